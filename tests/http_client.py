"""A raw HTTP/1.1 client for tests: what it sends is what is written, what it gets is checked as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.wire import GUARD_S, Wire


@dataclass
class Answer:
    """A response as it came; `chunks` are those of a chunked body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Server-sent events; every one is a `data:` line and a blank line."""
        assert self.body.endswith(b"\n\n")
        lines = self.body.decode().removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


class HttpClient:
    """A raw HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Host": "x", **({"Content-Length": str(len(data))} if body is not None else {}), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    async def read(self, timeout_s: float = GUARD_S) -> Answer:
        async with asyncio.timeout(timeout_s):
            status, headers = await self.read_head()
            if headers.get("transfer-encoding") == "chunked":
                body = b"".join([chunk async for chunk in self.read_chunks()])
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *fields = head.removesuffix("\r\n\r\n").split("\r\n")
        pairs = [field.split(": ", 1) for field in fields]
        return int(first.split()[1]), {name.lower(): value for name, value in pairs}

    async def read_chunks(self) -> AsyncIterator[bytes]:
        while size := int((await self.reader.readline()).strip(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        self.send(method, path, body, **options)
        return await self.read()

    async def is_closed(self) -> bool:
        async with asyncio.timeout(GUARD_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


async def connect(wire: Wire) -> HttpClient:
    client = await wire.connect()
    return HttpClient(client.reader, client.writer)
