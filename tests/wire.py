"""What the tests of the socket share: a scripted engine behind a real server, and a client that checks every frame."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeqwen.engine.inference import Inference
from edgeqwen.engine.settings import EngineLimits, ModelFiles
from edgeqwen.http.access import HttpAccess
from edgeqwen.protocol.limits import WireLimits
from edgeqwen.runtime.fake import FakeScript, load_fake
from edgeqwen.server import SocketServer, bind_socket
from edgeqwen.sessions.sessions import Sessions
from edgeqwen.sessions.store import SessionStore
from edgeqwen.text import ChatTemplate
from tests.tiny_tokenizers import byte_level

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


GUARD_S = 30.0
"""Against hanging; what is waited for takes milliseconds."""


@dataclass
class Gate:
    """In place of sleeping on the engine thread: waits until the gate is open, then sleeps."""

    opened: threading.Event = field(default_factory=threading.Event)

    def sleep(self, duration_s: float) -> None:
        self.opened.wait(2 * GUARD_S)
        time.sleep(duration_s)


def eos_id() -> int:
    eos = byte_level().token_id("<|im_end|>")
    assert eos is not None
    return eos


def token_ids(text: str) -> tuple[int, ...]:
    """Ids that a script says, added tokens in the text being tokens; then the end token."""
    return (*byte_level().encode(text, special=True), eos_id())


def fake_inference(
    text: str = "Hello!",
    *,
    gate: Gate | None = None,
    limits: EngineLimits | None = None,
    speculates: bool = True,
    **script: Any,
) -> Inference:
    """The real engine on a scripted runtime that says `text`, over a tokenizer of single bytes and a few words.

    What must still run when something else happens needs an engine that does not speculate: a text that repeats itself
    is soon over by guesses.
    """
    tokenizer = byte_level()
    members: dict[str, Any] = {"tokens": token_ids(text), "eos": eos_id(), "num_tokens": tokenizer.num_tokens} | script
    said = FakeScript(**members)
    sleep = time.sleep if gate is None else gate.sleep
    files = ModelFiles(
        name="scripted",
        quant="fp32",
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE),
        generation_defaults={"do_sample": False},
        eos_token_ids=(eos_id(),),
    )
    return Inference(
        runtime_factory=lambda progress: load_fake(said, progress, vocab_size=512, capacity=4096, sleep=sleep),
        model=files,
        limits=limits or EngineLimits(),
        speculates=speculates,
        seed_source=lambda: 42,
    )


class WireClient:
    """A raw connection. `read` checks what every frame must be; blank lines are counted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.num_blank = 0

    def send(self, *requests: Mapping[str, Any]) -> None:
        self.write(b"".join(json.dumps(request).encode() + b"\n" for request in requests))

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def shut(self) -> None:
        self.writer.write_eof()

    async def read(self, timeout_s: float = GUARD_S) -> dict[str, Any] | None:
        """The next frame, None at the end of the connection."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    line = await self.reader.readline()
                except ConnectionResetError:
                    return None
                if not line:
                    return None
                if line.strip():
                    return check_frame(line)
                self.num_blank += 1

    async def read_final(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The next final frame and the frames before it."""
        frames: list[dict[str, Any]] = []
        while True:
            frame = await self.read()
            assert frame is not None, "the connection ended before a final frame"
            if frame["done"]:
                return frame, frames
            frames.append(frame)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.send(request)
        return (await self.read_final())[0]

    async def read_all(self) -> list[dict[str, Any]]:
        frames = []
        while (frame := await self.read()) is not None:
            frames.append(frame)
        return frames

    def close(self) -> None:
        self.writer.transport.abort()


def check_frame(line: bytes) -> dict[str, Any]:
    """A frame is one line of JSON that starts with `id` and `done`."""
    assert line.endswith(b"\n")
    frame = json.loads(line)
    assert isinstance(frame, dict)
    names = list(frame)
    assert names[: 2 if "id" in frame else 1] == (["id", "done"] if "id" in frame else ["done"])
    assert isinstance(frame["done"], bool)
    if not frame["done"]:
        assert len(line) <= 32 << 10
    return frame


@dataclass(eq=False)
class Wire:
    """A running server with its engine."""

    path: Path
    inference: Inference
    server: SocketServer
    shutdowns: list[float | None]
    reloads: list[str]
    clients: list[WireClient]

    async def connect(self, *, limit: int = 4 << 20) -> WireClient:
        """A connection whose client reads at most twice `limit` bytes ahead, and no line longer than that."""
        reader, writer = await asyncio.open_unix_connection(str(self.path), limit=limit)
        client = WireClient(reader, writer)
        self.clients.append(client)
        return client


@contextlib.asynccontextmanager
async def serve(
    folder: Path,
    inference: Inference | None = None,
    limits: WireLimits | None = None,
    *,
    sessions: Sessions | None = None,
    access: HttpAccess | None = None,
    is_loaded: bool = True,
) -> AsyncIterator[Wire]:
    """A server on a private socket below `folder`; the model is loaded first unless `is_loaded` is false. `sessions`
    are those of `inference`; not given, they are in memory only.
    """
    os.chmod(folder, 0o700)
    inference = inference or fake_inference()
    shutdowns: list[float | None] = []
    sessions = sessions or Sessions(inference, SessionStore(None), random_bits=secrets.randbits)
    reloads: list[str] = []

    def reload(who: str) -> dict[str, Any]:
        reloads.append(who)
        return {"changed": ["limits.queue"], "restart": []}

    server = SocketServer(
        inference, sessions, limits=limits, on_shutdown=shutdowns.append, on_reload=reload, access=access
    )
    await sessions.load()
    await server.start(bind_socket(folder / "s.sock"))
    loading = asyncio.create_task(inference.start())
    if is_loaded:
        await loading
    wire = Wire(folder / "s.sock", inference, server, shutdowns, reloads, [])
    try:
        yield wire
    finally:
        for client in wire.clients:
            client.close()
        await server.close(grace_s=0.2)
        await loading
        await inference.close()
        await sessions.close()


async def until(condition: Callable[[], bool], timeout_s: float = GUARD_S) -> None:
    """Wait for `condition`; the time is a guard against hanging only."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event to wait on
            await asyncio.sleep(0.005)
