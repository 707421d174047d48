"""How many threads compute a step, and where: a decision, made of what the machine is and what was asked for.

**One thread a physical core.** Two hardware threads of a core share its multipliers and its way to memory; a second one
gains nothing and slows the first. So siblings stay free, for the event loop and for text.

**Performance cores only.** Each product is cut into equal parts and ends with the slowest, some four hundred times a
token; an efficiency core among the threads holds up all the others. Weaker cores join only where equal shares are still
much faster with them: for prompts from `WIDER_GAIN` on; for decoding, which waits for memory, only beside a single
performance core, because one core cannot keep memory busy.

**One socket.** The weights lie in the memory of the socket that loaded them; threads of another would read all of them
over the link between the two for each token, and wait for each other across it.

**A quota is rounded down.** Threads that wait for each other spin, which a quota counts as work; with more threads than
quota the whole group, the event loop included, stands still for the rest of each period (usually 0.1 s). What is left
of a fraction goes to the event loop and to text. Below one core there is still one thread.

**Placed, but only where there is no choice.** If all cores of the chosen kind compute, each thread gets one core and
stays there (with the core's siblings, so that the kernel can step aside). If only some do, fixed cores might be just
those that another process keeps busy (a second daemon would choose the same), so threads are held to the chosen kind of
core and the kernel picks. Where that is all cores they may run on anyway, nothing is set.

What was asked for comes first: a number of threads is taken as it is; a list of CPUs is computed on whatever kind of
core they are; OMP_NUM_THREADS counts if nothing else says a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, Final

from edgeqwen.cpu.sysfiles import format_cpu_list
from edgeqwen.cpu.topology import Core, Topology

WIDER_GAIN: Final = 1.5
"""How much faster equal shares must be, by capacity, before weaker cores join: capacity flatters weak cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadWishes:
    """What flags, configuration and environment ask for; 0 and empty are "nothing".

    `threads` is for both kinds of step unless one has a number of its own. `cpus` is a list such as `0-3,8`. Without
    `pin` no thread gets a core of its own; all are still held to the CPUs chosen.
    """

    threads: int = 0
    decode_threads: int = 0
    prefill_threads: int = 0
    cpus: str = ""
    pin: bool = True
    omp_num_threads: str = ""


@dataclass(frozen=True, slots=True)
class ThreadGroup:
    """Threads of one kind of step. Thread 0 is the one that runs the step, the others are the runtime's.

    `masks` holds the logical CPUs that each thread may run on; it is empty where nothing is to be set.
    """

    num_threads: int
    masks: tuple[tuple[int, ...], ...] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether each thread has a core of its own."""
        return bool(self.masks) and len(set(self.masks)) == self.num_threads

    @property
    def cpus(self) -> tuple[int, ...]:
        """Logical CPUs that the threads are held to; empty if they may run wherever the process may."""
        return tuple(sorted({cpu for mask in self.masks for cpu in mask}))

    @property
    def calling_cpus(self) -> tuple[int, ...]:
        """Logical CPUs for the thread that runs the step; empty if nothing is to be set."""
        return self.masks[0] if self.masks else ()

    @property
    def ort_affinities(self) -> str | None:
        """onnxruntime's `session.intra_op_thread_affinities`: all threads but the calling one, CPUs counted from 1.
        None if it is not to be set.
        """
        others = self.masks[1:]
        return ";".join(",".join(str(cpu + 1) for cpu in mask) for mask in others) if others else None

    def __str__(self) -> str:
        count = f"{self.num_threads} thread" + ("" if self.num_threads == 1 else "s")
        return f"{count} on CPUs {format_cpu_list(self.cpus)}" if self.masks else count


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Threads for decoding (few rows) and for prompts (many). Where one session does both, it takes those of `decode`.

    `usable` lists the logical CPUs there were to choose from. `reasons` says each decision in words, `warnings` what
    of it is likely to be slow.
    """

    decode: ThreadGroup
    prefill: ThreadGroup
    usable: tuple[int, ...] = ()
    quota: float | None = None
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def counts(self) -> tuple[int, int]:
        return self.decode.num_threads, self.prefill.num_threads

    def to_dict(self) -> dict[str, Any]:
        """For statistics and reports; `cpus` is empty if the threads may run wherever the process may."""
        return {
            "decode": self.decode.num_threads,
            "prefill": self.prefill.num_threads,
            "cpus": format_cpu_list(self.decode.cpus + self.prefill.cpus),
            "pinned": self.decode.is_pinned,
        }


def plan_threads(
    topology: Topology, wishes: ThreadWishes, *, quota: float | None = None, can_place: bool = True
) -> ThreadPlan:
    """The plan for the cores of `topology`: those that may be used, or of them those that `wishes.cpus` lists.

    `can_place` false: the kernel refuses to place threads, so none are.
    """
    assert topology.cores, "there is a CPU that this runs on"
    reasons: list[str] = []
    chosen = _chosen_cores(topology, wishes, reasons)
    counts = _counts(chosen, topology, wishes, quota=quota, reasons=reasons)
    groups = [ThreadGroup(count) for count in counts]
    if can_place:
        groups = [_placed(count, cores, topology, wishes) for count, cores in zip(counts, chosen, strict=True)]
    reasons.append(_placing_reason(groups[0], can_place=can_place))
    return ThreadPlan(
        decode=groups[0],
        prefill=groups[1],
        usable=topology.cpus,
        quota=quota,
        reasons=tuple(reasons),
        warnings=tuple(_warnings(max(counts), len(topology.cpus), quota)),
    )


def _chosen_cores(
    topology: Topology, wishes: ThreadWishes, reasons: list[str]
) -> tuple[Sequence[Core], Sequence[Core]]:
    """The cores that are to compute, for decoding and for prompts."""
    if topology.has_siblings:
        reasons.append(f"{len(topology.cpus)} logical CPUs on {len(topology.cores)} cores: one thread a core")
    if wishes.cpus:
        reasons.append(f"CPUs {format_cpu_list(topology.cpus)} were asked for: they compute, whatever kind they are")
        return topology.cores, topology.cores
    return _strong_cores(_cores_of_one_domain(topology, reasons), reasons)


def _cores_of_one_domain(topology: Topology, reasons: list[str]) -> Sequence[Core]:
    """Those of the socket that has most performance cores, of the first such one."""
    domains: dict[int, list[Core]] = {}
    for core in topology.cores:
        domains.setdefault(core.domain, []).append(core)
    best = max(domains.values(), key=lambda cores: sum(core.is_performance for core in cores))
    if len(domains) > 1:
        where = format_cpu_list(cpu for core in best for cpu in core.cpus)
        reasons.append(f"{len(domains)} sockets: CPUs {where} compute, since the weights lie in the memory of one")
    return best


def _strong_cores(cores: Sequence[Core], reasons: list[str]) -> tuple[Sequence[Core], Sequence[Core]]:
    """The performance cores, and weaker ones where that pays."""
    strong = [core for core in cores if core.is_performance]
    if len(strong) == len(cores):
        return cores, cores
    levels = {core.capacity for core in cores if not core.is_performance}
    candidates = [sorted((core for core in cores if core.capacity >= level), key=_weakness) for level in levels]
    wider = max(candidates, key=_shared_speed)
    gains = _shared_speed(wider) >= WIDER_GAIN * _shared_speed(strong)
    prefill = wider if gains else strong
    decode = wider if gains and len(strong) == 1 else strong
    for kind, chosen in (("decoding", decode), ("prompts", prefill)):
        which = "performance cores only" if chosen is strong else f"{len(chosen)} cores of both kinds"
        reasons.append(f"{len(strong)} performance and {len(cores) - len(strong)} weaker cores: {which} for {kind}")
    return decode, prefill


def _weakness(core: Core) -> tuple[float, tuple[int, ...]]:
    return -core.capacity, core.cpus


def _shared_speed(cores: Sequence[Core]) -> float:
    """Speed of work in equal shares, in strongest cores: the weakest core sets the pace of all."""
    return len(cores) * min(core.capacity for core in cores)


def _counts(
    chosen: tuple[Sequence[Core], Sequence[Core]],
    topology: Topology,
    wishes: ThreadWishes,
    *,
    quota: float | None,
    reasons: list[str],
) -> list[int]:
    """Numbers of threads for decoding and for prompts."""
    asked = (wishes.decode_threads or wishes.threads, wishes.prefill_threads or wishes.threads)
    if any(asked):
        reasons.append(f"threads asked for: {_either(asked)}")
    if all(asked):
        return list(asked)
    wanted = [len(cores) for cores in chosen]
    if omp := _omp_threads(wishes.omp_num_threads):
        wanted = [min(omp, len(topology.cpus))] * 2
        reasons.append(f"OMP_NUM_THREADS is {wishes.omp_num_threads}: {wanted[0]} in all")
    elif wishes.omp_num_threads:
        reasons.append(f"OMP_NUM_THREADS is {wishes.omp_num_threads!r}, which is no number of threads: not heeded")
    if quota is not None and (whole := max(1, floor(quota))) < max(wanted):
        wanted = [min(whole, number) for number in wanted]
        reasons.append(f"a quota of {quota:g} cores: {whole} in all, so that it lasts for the whole of each period")
    return [own or number for own, number in zip(asked, wanted, strict=True)]


def _either(asked: tuple[int, int]) -> str:
    decode, prefill = (str(number) if number else "by plan" for number in asked)
    return decode if decode == prefill else f"{decode} for decoding, {prefill} for prompts"


def _omp_threads(text: str) -> int:
    """The first number of OMP_NUM_THREADS, which may list one for each level of nesting; 0 if it is none."""
    first = text.split(",", maxsplit=1)[0].strip()
    return int(first) if first.isascii() and first.isdigit() and len(first) < 6 else 0


def _placed(count: int, cores: Sequence[Core], topology: Topology, wishes: ThreadWishes) -> ThreadGroup:
    """`count` threads, each on a core of its own if they take all of `cores`, else held to them together."""
    if count == len(cores) and wishes.pin:
        masks = tuple(core.cpus for core in cores)
    elif count <= len(cores):
        masks = (tuple(sorted(cpu for core in cores for cpu in core.cpus)),) * count
    else:
        masks = (topology.cpus,) * count
    is_anywhere = all(mask == topology.cpus for mask in masks)
    return ThreadGroup(count) if is_anywhere and not wishes.cpus else ThreadGroup(count, masks)


def _placing_reason(group: ThreadGroup, *, can_place: bool) -> str:
    if not can_place:
        return "the kernel does not let threads be placed: they run wherever it puts them"
    if group.is_pinned:
        return "each thread has a core of its own"
    if group.masks:
        return "threads are held to these CPUs together, not to single ones: others may be at work there"
    return "threads run wherever the kernel puts them"


def _warnings(most: int, num_cpus: int, quota: float | None) -> list[str]:
    warnings = []
    if most > num_cpus:
        where = "1 CPU" if num_cpus == 1 else f"{num_cpus} CPUs"
        warnings.append(f"{most} threads on {where} wait for each other; ask for {num_cpus} at most")
    if quota is not None and most > quota:
        advice = f"ask for {floor(quota)} at most" if quota >= 1 else "give it a core (CPUQuota=100%) or more"
        text = f"{most} threads use up a quota of {quota:g} cores early in each period, then everything stands still"
        warnings.append(f"{text}; {advice}")
    return warnings
