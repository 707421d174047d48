"""The life of an engine: loaded on its thread, at work, asleep and woken, drained, closed; and what a request is told
meanwhile.

loading --> ready --> draining
   |  ^       |
   |  +--- asleep         nothing of the model is in memory; the next request wakes it
   +--> failed
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeAlias

from edgeqwen.core.step import Runtime
from edgeqwen.cpu import forget_pages, trim_heap
from edgeqwen.engine.engine import Engine
from edgeqwen.engine.worker import EngineThread
from edgeqwen.errors import EdgeqwenError, ModelReplaced, RuntimeFailed

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["loading", "ready", "asleep", "draining", "failed"]
RuntimeFactory: TypeAlias = Callable[[Callable[[float], None]], Runtime]

LOADING_RETRY_MS: Final = 1500
CLOSE_TIMEOUT_S: Final = 5.0
DISK_TIMEOUT_S: Final = 1.0
"""How long it may take to learn what a disk holds of the cache before requests are served without."""

BROKEN: Final = "the engine broke down; the log says why"


class EngineLife:
    """Brings one engine to life and to its end. `engine` is None unless it is ready; `progress` goes from 0 to 1.

    `runtime_factory(progress)` runs on the engine thread and may call `progress(0..1)` there; `make_engine` puts an
    engine around what it gives. `on_ready` is told of each engine that begins to work.
    """

    def __init__(
        self,
        runtime_factory: RuntimeFactory,
        make_engine: Callable[[Runtime, EngineThread], Engine],
        *,
        on_ready: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        self.state: State = "loading"
        self.progress = 0.0
        self.engine: Engine | None = None
        self._factory = runtime_factory
        self._make_engine = make_engine
        self._on_ready = on_ready
        self._thread = EngineThread()
        self._task: asyncio.Task[None] | None = None  # the engine's loop
        self._change: asyncio.Task[None] | None = None  # falling asleep, or waking
        self._waking_error: EdgeqwenError | None = None
        self._is_closed = False
        self._settled = asyncio.Event()  # loading is over, one way or the other
        self._broken = asyncio.Event()
        self._breakage: RuntimeFailed | None = None

    async def start(self) -> None:
        """Load the model; returns when requests run. Raises what the factory raises, and the state is `failed` then.

        Raises `EdgeqwenError` (`draining`) if it is told to stop meanwhile.
        """
        assert self.state == "loading"
        self._thread.start()
        try:
            await self._bring_up()
        except Exception:
            if self.state == "loading":
                self.state = "failed"
            raise
        finally:
            self._settled.set()

    async def _bring_up(self) -> None:
        """From `loading` to `ready`. Raises as `start` does, and leaves the state to the caller."""
        runtime = await self._thread.run(self._load)
        self._check_loading()
        engine = self._make_engine(runtime, self._thread)
        self._task = asyncio.create_task(self._run(engine))
        await engine.until_disk_is_known(DISK_TIMEOUT_S)
        if self.state != "loading":
            await self._put_away(engine, self._task)
        self._check_loading()
        self.engine = engine
        self.state = "ready"
        self.progress = 1.0
        self._on_ready(engine)

    def _check_loading(self) -> None:
        if self.state != "loading":  # stopped meanwhile
            raise EdgeqwenError("stopped while the model was loaded", code="draining")

    def _load(self) -> Runtime:
        """On the engine thread."""
        runtime = self._factory(self._set_progress)
        if self.state != "loading":
            runtime.close()
            self._check_loading()
        return runtime

    def _set_progress(self, progress: float) -> None:
        self.progress = progress  # a float is replaced as a whole, so the event loop may read it at any time

    async def _run(self, engine: Engine) -> None:
        """The engine's loop, and what is left to do should it break: no request may wait for ever."""
        try:
            await engine.run()
        except Exception:
            logger.exception("the engine's loop broke")
            self._break(RuntimeFailed(BROKEN))
            engine.fail_all(RuntimeFailed(BROKEN))

    def _break(self, error: RuntimeFailed) -> None:
        """Nothing but a new process helps."""
        self.state = "failed"
        self._breakage = error
        self._broken.set()

    # Sleep.

    def fall_asleep(self) -> None:
        """Give all memory of the model back. The engine must be ready and have nothing to do."""
        assert self.state == "ready"
        assert self.engine is not None
        assert self.engine.is_idle
        assert self._task is not None
        engine, self.engine = self.engine, None
        self.state = "asleep"
        self.progress = 0.0
        self._change = asyncio.create_task(self._unload(engine, self._task))

    async def _unload(self, engine: Engine, task: asyncio.Task[None]) -> None:
        await self._put_away(engine, task)
        del engine, task
        self._task = None
        await self._thread.run(_give_back_memory)

    async def _put_away(self, engine: Engine, task: asyncio.Task[None]) -> None:
        engine.close()
        await task
        await engine.close_disk()
        await self._thread.run(engine.close_runtime)

    def while_asleep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have `work` done before the model is loaded again, and after whatever else is to be done before."""
        assert self.state == "asleep"
        self._change = asyncio.create_task(_after(self._change, work))

    @property
    def is_changing(self) -> bool:
        """Falling asleep or waking is under way."""
        return self._change is not None and not self._change.done()

    def wake(self) -> None:
        """Begin to load the model again, if it sleeps; a request may wait for it like for the first load."""
        if self.state == "asleep":
            self.state = "loading"
            self._waking_error = None
            self._settled.clear()
            self._change = asyncio.create_task(self._wake(self._change))

    async def _wake(self, before: asyncio.Task[None] | None) -> None:
        try:
            await _after(before, self._bring_up)
        except Exception as error:  # the next request tries again: what was amiss may have passed
            if isinstance(error, ModelReplaced):
                self._break(error)
            elif self.state == "loading":
                self._waking_error = _told(error)
                is_told = error is self._waking_error
                logger.error("waking failed: %s", self._waking_error.message, exc_info=None if is_told else error)
                self.state = "asleep"
        finally:
            self._settled.set()

    async def until_settled(self) -> None:
        """Return when falling asleep or waking is over, if either is under way."""
        if self._change is not None:
            await asyncio.wait({self._change})

    # What a request asks.

    async def answer(self) -> None:
        """Return when the engine thread has got round to answering."""
        await self._thread.run(lambda: None)

    async def wait_until_broken(self) -> RuntimeFailed:
        """Return if the engine's loop breaks, or its model is replaced: only a new process serves again."""
        await self._broken.wait()
        assert self._breakage is not None
        return self._breakage

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
                raise self._breakage or EdgeqwenError("the model could not be loaded", code="engine")
            case "asleep" if self._waking_error is not None:
                raise self._waking_error

    # The end.

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
        is_asleep, engine = self.state == "asleep", self.engine
        self._refuse_work()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if is_asleep:  # a load that is under way sees for itself that it is not wanted any more
                    await self.until_settled()
                if engine is not None and self._task is not None:
                    engine.cancel_all()
                    await self._put_away(engine, self._task)
        except TimeoutError:
            logger.warning("the engine thread is still inside the runtime: it is left behind")
        self._thread.stop()


async def _after(before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await before
    await work()


def _told(error: Exception) -> EdgeqwenError:
    """What clients are told of an error."""
    if isinstance(error, EdgeqwenError):
        return error
    return RuntimeFailed(f"the model could not be loaded: {type(error).__name__}")


def _give_back_memory() -> None:
    """What a model leaves behind: objects that refer to each other, the allocator's free blocks, and pages of libraries
    that stay in the page cache for as long as there is room.
    """
    gc.collect()
    trim_heap()
    forget_pages()
