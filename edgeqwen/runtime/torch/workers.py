"""Where the threads that compute a step run.

OpenMP starts them at the first product of the thread that calls, and its own settings for their places bind that thread
too, before it is known which one it will be. So they are told by what is new among the process's threads, and placed
one by one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

TASKS: Final = Path("/proc/self/task")
ELEMENTS: Final = 1 << 20
"""Of a sum that torch shares out among all its threads."""


def start_workers(num_threads: int, masks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Have OpenMP start the calling thread's workers, and hold each to its mask; the calling thread is `masks[0]`'s and
    is left alone. Returns the workers' thread ids. No masks: they run wherever they may.
    """
    torch.set_num_threads(num_threads)
    before = _threads()
    torch.ones(ELEMENTS).add_(1)
    workers = tuple(sorted(_threads() - before))
    for worker, mask in zip(workers, masks[1:], strict=False):
        with contextlib.suppress(OSError):  # the kernel may not let threads be placed: its own choice is as good
            os.sched_setaffinity(worker, mask)
    return workers


def _threads() -> set[int]:
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir(TASKS)}
    return set()
