"""One run of `edgeqwen batch`: items from the input as there is room, answers to the output as they come.

The input is read piece by piece, so neither its length nor that of the output matters to memory; the keys of what is
done do. A daemon that is full, loading or restarting is asked again; an answer that the connection took with it too.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from edgeqwen.cli.batch_output import BatchOutput, Key, StandardOutput
from edgeqwen.client import AsyncClient, CutOff, NoDaemon, TryAgain
from edgeqwen.client.frames import encode_request
from edgeqwen.errors import CODES, BadRequest, EdgeqwenError, FileError, ModelMissing
from edgeqwen.protocol.batch_plan import read_plan
from edgeqwen.protocol.item_reader import ItemReader
from edgeqwen.protocol.messages import RequestId, read_id
from edgeqwen.protocol.replies import error_members

STANDARD_STREAM: Final = "-"
READ_BYTES: Final = 64 << 10
FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 5.0
SHORTEST_DELAY_S: Final = 0.05


class InputFile(FileError):
    """An input that is no JSON (exit 65)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """`patience_s` is how long a daemon that answers nothing but "later", or is gone, is asked again for one item."""

    file: Path
    out: Path
    socket_path: Path
    op: str
    common: Mapping[str, Any]
    in_flight: int
    patience_s: float


@dataclass(slots=True)
class Tally:
    """What became of the items. `exit_code` is that of the first error."""

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    exit_code: int = 0

    def note(self, error: EdgeqwenError | None) -> None:
        if error is None:
            self.num_answered += 1
        else:
            self.num_failed += 1
            self.exit_code = self.exit_code or error.exit_code


@dataclass(frozen=True, slots=True)
class Item:
    """`members` is what is sent; `key` says which one it is in the output."""

    key: Key
    members: Mapping[str, Any] = field(default_factory=dict)
    error: EdgeqwenError | None = None


async def run(job: BatchJob, show: Callable[[float], None]) -> Tally:
    """Answer all that is not in the output yet; `show` is told the share of the input that was read.

    Raises `EdgeqwenError`: files that cannot be used, options that are wrong, no daemon.
    """
    read_plan(job.op, job.common, has_ids=True)
    fd = _open_input(job.file)
    try:
        if str(job.out) == STANDARD_STREAM:
            return await _Run(job, StandardOutput(), show).work(fd)
        output = BatchOutput(job.out)
        try:
            if output.is_same_file(fd):
                raise BadRequest("the output must be another file than the input")
            return await _Run(job, output, show).work(fd)
        finally:
            output.close()
    finally:
        os.close(fd)


def _open_input(path: Path) -> int:
    try:
        return os.dup(sys.stdin.fileno()) if str(path) == STANDARD_STREAM else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise ModelMissing(f"{path}: {exc.strerror}") from exc


class _Run:
    def __init__(self, job: BatchJob, output: BatchOutput | StandardOutput, show: Callable[[float], None]) -> None:
        self._job = job
        self._output = output
        self._show = show
        self._tally = Tally()
        self._link = _Connection(job)
        self._line_bytes = 0

    async def work(self, fd: int) -> Tally:
        """Read, ask, write. A failure of one item's task is that of the run."""
        client = await self._link.client()  # a daemon that is not there is told before anything is read
        self._line_bytes = (await client.hello())["limits"]["line"]
        wrong: InputFile | None = None
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    await self._ask_all(fd, group)
                except InputFile as exc:  # what came before it is answered first
                    wrong = exc
        except* EdgeqwenError as errors:
            raise _first(errors) from None
        finally:
            self._link.close()
        if wrong is not None:
            raise wrong
        return self._tally

    async def _ask_all(self, fd: int, group: asyncio.TaskGroup) -> None:
        places = asyncio.Semaphore(self._job.in_flight)
        async for item in self._items(fd):
            if item.error is not None:
                self._write(item, {}, item.error)
                continue
            await places.acquire()
            task = group.create_task(self._answer(item))
            task.add_done_callback(lambda _: places.release())

    async def _items(self, fd: int) -> AsyncIterator[Item]:
        """What is still to be answered. Raises `InputFile` where the input is wrong, after what is before that."""
        plan = read_plan(self._job.op, self._job.common, has_ids=True)
        seen: set[RequestId] = set()
        index = -1
        async for members in _read_items(fd, self._show):
            index += 1
            key: Key = ("index", index)
            error: EdgeqwenError | None = None
            item_id: RequestId | None = None
            try:
                if isinstance(members, dict):
                    item_id = read_id(members)
                if item_id is not None:
                    key = ("id", item_id)
                if key in self._output.done:
                    self._tally.num_skipped += 1
                    continue
                plan.read_item(members)
                if item_id is not None and item_id in seen:
                    key = ("index", index)
                    raise BadRequest("another item has this id", field="id")
                sent = {**self._job.common, **{name: value for name, value in members.items() if name != "id"}}
                self._check_length(sent)
            except EdgeqwenError as exc:
                error = exc
            if item_id is not None:
                seen.add(item_id)
            yield Item(key, {}, error) if error is not None else Item(key, sent)

    def _check_length(self, members: Mapping[str, Any]) -> None:
        """The daemon would close the connection, with all that is in flight there."""
        if len(encode_request(self._job.op, 1 << 52, members)) > self._line_bytes:
            text = f"the request is longer than {self._line_bytes} bytes"
            raise EdgeqwenError(text, code="too_large")

    async def _answer(self, item: Item) -> None:
        error: EdgeqwenError | None = None
        frame: Mapping[str, Any] = {}
        try:
            frame = await self._ask(item)
        except EdgeqwenError as exc:
            if _may_pass(exc):  # it did not, for as long as we waited; the next run asks again
                raise
            error = exc
        self._write(item, frame, error)

    async def _ask(self, item: Item) -> Mapping[str, Any]:
        """The final frame. What may succeed later is tried again, until patience is at its end."""
        give_up_at = time.monotonic() + self._job.patience_s
        delay_s = FIRST_DELAY_S
        while True:
            client = None
            try:
                client = await self._link.client()
                frame = await client.request(self._job.op, **item.members)
                if frame.get("finish") != "cancelled":
                    return frame
                raise CutOff("the daemon ended before the answer did")  # nobody else cancels
            except EdgeqwenError as exc:
                if client is not None and not isinstance(exc, TryAgain) and _may_pass(exc):
                    self._link.drop(client)
                if not _may_pass(exc) or time.monotonic() >= give_up_at:
                    raise
                asked_s = max(SHORTEST_DELAY_S, exc.retry_ms / 1000) if exc.retry_ms is not None else delay_s
            await asyncio.sleep(min(asked_s, LONGEST_DELAY_S))
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _write(self, item: Item, frame: Mapping[str, Any], error: EdgeqwenError | None) -> None:
        name, value = item.key
        members = {key: value for key, value in frame.items() if key not in {"id", "done"}}
        if error is not None:
            members = error_members(error)
        self._output.append({name: value, **members})
        self._tally.note(error)


class _Connection:
    """One connection for all items, made anew when it is gone."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        self._client: AsyncClient | None = None
        self._lock = asyncio.Lock()

    async def client(self) -> AsyncClient:
        async with self._lock:
            if self._client is None:
                self._client = await AsyncClient.connect(self._job.socket_path, max_inflight=self._job.in_flight)
            return self._client

    def drop(self, client: AsyncClient) -> None:
        """It is gone: whoever asks next connects again."""
        if self._client is client:
            self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


async def _read_items(fd: int, show: Callable[[float], None]) -> AsyncIterator[Any]:
    reader = ItemReader()
    size = os.fstat(fd).st_size
    num_read = 0
    is_over = False
    while not is_over and reader.error is None:
        await _readable(fd)
        data = os.read(fd, READ_BYTES)
        is_over = not data
        items = reader.finish() if is_over else reader.feed(data)
        if reader.has_begun and reader.head:
            raise InputFile("the input has members besides its items; give these alone, and --common for the rest")
        for item in items:
            yield item
        num_read += len(data)
        show(num_read / size if size else 0.0)
    if reader.error is not None:
        raise InputFile(reader.error.message)


async def _readable(fd: int) -> None:
    """Wait until something can be read. Of a file it always can, and the loop would not watch one."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(fd, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(fd)


def _may_pass(error: EdgeqwenError) -> bool:
    """Whether it is about the daemon or the connection, and not about this item."""
    return isinstance(error, CutOff | NoDaemon | TryAgain) or CODES[error.code].is_fatal


def _first(errors: BaseExceptionGroup[EdgeqwenError]) -> EdgeqwenError:
    """That of the item that gave up first."""
    first = errors.exceptions[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
