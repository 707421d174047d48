"""A headless Chromium, driven by its DevTools protocol (chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

HANG_GUARD_S = 20.0
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless=new", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--mute-audio", "--no-sandbox", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--hide-scrollbars", "about:blank"),
)


@dataclass(eq=False)
class Tab:
    """One page. `faults` collects what it writes to its console and what its policy refuses."""

    socket: ClientWebSocketResponse
    faults: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def listen(self) -> None:
        async for message in self.socket:
            if message.type is not WSMsgType.TEXT:
                continue
            data = message.json()
            if (waiting := self._waiting.pop(data.get("id", 0), None)) is not None:
                waiting.set_result(data)
            elif data.get("method") == "Runtime.exceptionThrown":
                self.faults.append(str(data["params"]["exceptionDetails"].get("exception", data["params"])))
            elif data.get("method") == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.faults.append(data["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers to a command."""
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(HANG_GUARD_S):
            data = await future
        assert "error" not in data, data
        result: dict[str, Any] = data["result"]
        return result

    async def eval(self, script: str) -> Any:
        """The value of an expression, waited for if it is a promise."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        async with asyncio.timeout(HANG_GUARD_S):
            while not (value := await self.eval(script)):  # noqa: ASYNC110 -- a browser has no event for it
                await asyncio.sleep(0.02)
        return value

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def type(self, text: str) -> None:
        """Into what has the focus, then Enter."""
        await self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def dark(self) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which knows nothing and ends with the test."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="eq-browser-", ignore_cleanup_errors=True) as profile:
        environ = {**os.environ, "HOME": profile}
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            f"--user-data-dir={profile}",
            *FLAGS,
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=environ,
        )
        try:
            port = await _debugging_port(process)
            async with ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    (page,) = [each for each in await answer.json() if each["type"] == "page"]
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    listening = asyncio.create_task(tab.listen())
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _debugging_port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(HANG_GUARD_S):
        while line := await process.stderr.readline():
            if found := re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line):
                return int(found[1])
    raise AssertionError("the browser did not start")
