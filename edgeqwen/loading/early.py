"""A runtime that is loaded while something else is done.

Large weights are loaded while the files that concern text are read: both take their time in native code, and a second
processor would be idle. Whether that went well is told where the runtime is asked for, on the engine thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from edgeqwen.core.step import Runtime
from edgeqwen.engine.life import RuntimeFactory

MOST_PATIENCE_S: Final = 1.0  # a package may have to be remade first, and the socket is to listen before that
HEAD_START_S: Final = 0.02
"""What the threads that open the graphs need to leave the interpreter."""


class EarlyRuntime:
    """A runtime whose loading begins at once; call it like `Model.runtime_factory` to wait for the result. Called once
    more, it loads another.
    """

    def __init__(self, load: RuntimeFactory) -> None:
        self._load = load
        self._progress: Callable[[float], None] = lambda _: None
        self._is_native = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="loading")
        self._result: Future[Runtime] | None = self._executor.submit(load, self._report)
        self._result.add_done_callback(lambda _: self._is_native.set())

    def let_begin(self) -> None:
        """Wait until the loading is in native code: what holds the interpreter (reading a tokenizer does, for a third
        of a second) would keep it from getting there.
        """
        self._is_native.wait(MOST_PATIENCE_S)
        time.sleep(HEAD_START_S)

    def __call__(self, progress: Callable[[float], None]) -> Runtime:
        result, self._result = self._result, None  # whoever has it frees it
        if result is None:
            return self._load(progress)
        self._progress = progress
        try:
            return result.result()
        finally:
            self._executor.shutdown(wait=False)

    def _report(self, fraction: float) -> None:
        self._is_native.set()
        self._progress(fraction)
