"""The life of an engine: loaded on its thread, at work, drained, closed; and what a request is told meanwhile.

loading --> ready --> draining
   |          |
   +----------+--> failed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from edgeqwen.core.step import Runtime
from edgeqwen.engine.engine import Engine
from edgeqwen.engine.worker import EngineThread
from edgeqwen.errors import EdgeqwenError, RuntimeFailed

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["loading", "ready", "draining", "failed"]
RuntimeFactory: TypeAlias = Callable[[Callable[[float], None]], Runtime]

LOADING_RETRY_MS: Final = 1500
CLOSE_TIMEOUT_S: Final = 5.0
BROKEN: Final = "the engine broke down; the log says why"


class EngineLife:
    """Brings one engine to life and to its end. `engine` is None until it is ready; `progress` goes from 0 to 1.

    `runtime_factory(progress)` runs on the engine thread and may call `progress(0..1)` there; `make_engine` puts an
    engine around what it gives.
    """

    def __init__(self, runtime_factory: RuntimeFactory, make_engine: Callable[[Runtime, EngineThread], Engine]) -> None:
        self.state: State = "loading"
        self.progress = 0.0
        self.engine: Engine | None = None
        self._factory = runtime_factory
        self._make_engine = make_engine
        self._thread = EngineThread()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._settled = asyncio.Event()  # loading is over, one way or the other
        self._broken = asyncio.Event()

    async def start(self) -> Engine:
        """Load the model; returns when requests run. Raises what the factory raises, and the state is `failed` then.

        Raises `EdgeqwenError` (`draining`) if it is told to stop meanwhile.
        """
        assert self.state == "loading"
        self._thread.start()
        try:
            runtime = await self._thread.run(self._load)
        except Exception:
            if self.state == "loading":
                self.state = "failed"
            self._settled.set()
            raise
        if self.state != "loading":  # stopped between the end of loading and here
            raise EdgeqwenError("stopped while the model was loaded", code="draining")
        engine = self.engine = self._engine_of(runtime)
        self._task = asyncio.create_task(self._run(engine))
        self.state = "ready"
        self.progress = 1.0
        self._settled.set()
        return engine

    def _engine_of(self, runtime: Runtime) -> Engine:
        try:
            return self._make_engine(runtime, self._thread)
        except EdgeqwenError:
            self.state = "failed"
            self._settled.set()
            raise

    def _load(self) -> Runtime:
        """On the engine thread."""
        runtime = self._factory(self._set_progress)
        if self.state != "loading":
            runtime.close()
            raise EdgeqwenError("stopped while the model was loaded", code="draining")
        return runtime

    def _set_progress(self, progress: float) -> None:
        self.progress = progress  # a float is replaced as a whole, so the event loop may read it at any time

    async def _run(self, engine: Engine) -> None:
        """The engine's loop, and what is left to do should it break: no request may wait for ever."""
        try:
            await engine.run()
        except Exception:
            logger.exception("the engine's loop broke")
            self.state = "failed"
            self._broken.set()
            engine.fail_all(RuntimeFailed(BROKEN))

    async def wait_until_broken(self) -> RuntimeFailed:
        """Return if the engine's loop breaks, which nothing mends: only a new process serves again."""
        await self._broken.wait()
        return RuntimeFailed(BROKEN)

    async def is_loaded_within(self, timeout_s: float) -> bool:
        """Wait for the end of loading, however it ends; False if it lasts longer than that."""
        if self.state != "loading":
            return True
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True

    def check_ready(self) -> None:
        """Raise what keeps requests from running now: `loading`, `draining` or `engine`."""
        match self.state:
            case "loading":
                raise EdgeqwenError("model loading", code="loading", retry_ms=LOADING_RETRY_MS)
            case "draining":
                raise EdgeqwenError("the daemon is shutting down", code="draining")
            case "failed":
                raise EdgeqwenError("the model could not be loaded, or its engine broke down", code="engine")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, let what runs finish, and cancel what is left after `timeout_s`."""
        self._refuse_work()
        engine = self.engine
        if engine is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await engine.wait_until_idle()
        except TimeoutError:
            engine.cancel_all()

    def _refuse_work(self) -> None:
        if self.state != "failed":
            self.state = "draining"
        self._settled.set()

    async def close(self) -> None:
        """Cancel what is left and free the runtime; once is enough. A step that hangs is given up after a while."""
        if self._is_closed:
            return
        self._is_closed = True
        self._refuse_work()
        engine = self.engine
        if engine is not None:
            engine.cancel_all()
            engine.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self._task is not None:
                    await self._task
                if engine is not None:
                    await engine.close_disk()
                    await self._thread.run(engine.close_runtime)
        except TimeoutError:
            logger.warning("the engine thread is still inside the runtime: it is left behind")
        self._thread.stop()
