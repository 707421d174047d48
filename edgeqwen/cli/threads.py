"""The flags that say how many threads compute and where, and the plan that comes of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from edgeqwen.cpu import Processor, ThreadPlan

THREADS_HELP: Final = "Threads that compute. Default: one a performance core, or $OMP_NUM_THREADS."
CPUS_HELP: Final = "CPUs that compute, such as 0-3,8. Default: those the process may use."

OMP_VARIABLE: Final = "OMP_NUM_THREADS"


def thread_options(function: Any) -> Any:
    """`--threads` and `--cpus` of a command that runs a model itself; `planned_threads` takes them."""
    function = click.option("--cpus", metavar="LIST", default="", help=CPUS_HELP)(function)
    return click.option("--threads", type=click.IntRange(0, 1024), default=0, metavar="N", help=THREADS_HELP)(function)


def checked_processor() -> Processor:
    """This machine's processor. Raises `ConfigInvalid` if it is too old for the native libraries, so to be called
    before any of them is imported.
    """
    from edgeqwen.cpu import check_processor, read_processor

    processor = read_processor()
    check_processor(processor)
    return processor


def planned_threads(**wishes: Any) -> ThreadPlan:
    """The plan for this process; `wishes` as `ThreadWishes` has them. Raises `ConfigInvalid`."""
    from edgeqwen.cpu import ThreadWishes, read_thread_plan

    return read_thread_plan(ThreadWishes(omp_num_threads=os.environ.get(OMP_VARIABLE, ""), **wishes))
