"""The thread plan of this process: what the kernel says of it, put together; and placing the thread that asks for it.

The affinity mask is what `taskset` and cpusets leave; `os.cpu_count()` knows neither. CPUs that are switched off and
those outside of the group's cpuset are left out as well, should the mask still name them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from edgeqwen.cpu.groups import cpu_quota, cpuset
from edgeqwen.cpu.plan import ThreadPlan, ThreadWishes, plan_threads
from edgeqwen.cpu.sysfiles import format_cpu_list, parse_cpu_list
from edgeqwen.cpu.topology import online_cpus, read_topology
from edgeqwen.errors import ConfigInvalid


def read_thread_plan(
    wishes: ThreadWishes,
    root: Path = Path("/"),
    *,
    affinity: Collection[int] | None = None,
    can_place: bool | None = None,
) -> ThreadPlan:
    """The plan for this process. `affinity` and `can_place` None: ask the kernel.

    Raises `ConfigInvalid` that names what is wrong with the list of CPUs asked for.
    """
    usable = usable_cpus(root, affinity)
    cpus = _listed_cpus(wishes.cpus, usable) if wishes.cpus else usable
    can_place = may_place_threads() if can_place is None else can_place
    return plan_threads(read_topology(root, cpus), wishes, quota=cpu_quota(root), can_place=can_place)


def usable_cpus(root: Path = Path("/"), affinity: Collection[int] | None = None) -> tuple[int, ...]:
    """Logical CPUs that this process may run on, at least one, ascending."""
    usable = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    for others in (online_cpus(root), cpuset(root)):
        usable = usable & others or usable  # a description that has none of them is not of this machine
    return tuple(sorted(usable))


def _listed_cpus(text: str, usable: Sequence[int]) -> tuple[int, ...]:
    where = "--cpus (cpu.cpus)"
    try:
        listed = parse_cpu_list(text)
    except ValueError as error:
        raise ConfigInvalid(f"{where}: {error}") from error
    if not listed:
        raise ConfigInvalid(f"{where}: {text!r} lists no CPU; write 0-3 or 0,2")
    if foreign := [cpu for cpu in listed if cpu not in usable]:
        raise ConfigInvalid(
            f"{where}: CPU {format_cpu_list(foreign)} is not one that this process may use, "
            f"those are {format_cpu_list(usable)}"
        )
    return listed


def may_place_threads() -> bool:
    """Whether the kernel lets a thread choose its CPUs (a sandbox may forbid the call). Tried on a thread of its own:
    a mask that was set, even to what it is, no longer follows the cpuset.
    """
    allowed: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(0))
            allowed.append(True)

    thread = threading.Thread(target=attempt, name="placing")
    thread.start()
    thread.join()
    return bool(allowed)


@contextlib.contextmanager
def placed(cpus: Collection[int]) -> Iterator[None]:
    """The calling thread is held to these CPUs inside, as far as the kernel lets it, and afterwards is where it was."""
    before = os.sched_getaffinity(0)
    is_placed = place_calling_thread(cpus)
    try:
        yield
    finally:
        if is_placed:
            place_calling_thread(before)


def place_calling_thread(cpus: Collection[int]) -> bool:
    """Hold the calling thread, and those that it starts from now on, to these CPUs; nothing if there are none.

    Returns whether that was done. To be called after the sessions are open: their threads would inherit the mask.
    """
    if not cpus:
        return False
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # they were taken away from the process in the meantime: the kernel's choice is as good
        return False
    return True
