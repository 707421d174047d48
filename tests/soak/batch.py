"""A batch of 50 MB over HTTP: the daemon answers all of it and does not grow.

    scripts/soak batch [--items 10000] [--item-bytes 5000] [--most-growth-mb 20] [--most-later-growth-mb 10]

The body is one JSON array, sent as fast as it is taken while the answers are read, by a daemon whose scripted model
remembers nothing. What it takes is looked at all the time, and held against what it took when it had just loaded (its
first request over HTTP brings the library for that), and more strictly against what a first, short batch has left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.processes import anonymous_bytes
from tests.soak.service import GUARD_S, Service, scripted_model
from tests.soak.words import some_words

HEAD: Final = (
    b"POST /eqp/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
FIRST_ITEMS: Final = 64
WORD_BYTES: Final = 6
PERIOD_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`item_bytes` of a prompt; growth since loading, and since a first batch, is in units of 10^6 bytes."""

    num_items: int = 10_000
    item_bytes: int = 5_000
    max_tokens: int = 2
    most_growth_mb: float = 20.0
    most_later_growth_mb: float = 10.0
    seed: int = 1


def run(folder: Path, size: Size) -> dict[str, Any]:
    """Raises AssertionError if an item is not answered or the daemon grows by more; else what there was to see."""
    model = scripted_model(folder / "model", records=False, kv_bytes_per_token=4)
    service = Service(folder / "daemon", model, kv_memory_mb=16, kv_disk_mb=0, kv_context=2 * size.item_bytes)
    with service:
        pid = service.process.pid
        start_bytes = anonymous_bytes(pid)
        ask(service, dataclasses.replace(size, num_items=min(FIRST_ITEMS, size.num_items)))
        first_bytes = anonymous_bytes(pid)
        began = time.monotonic()
        with Peak(pid) as peak:
            num_bytes = ask(service, size)
        took_s = time.monotonic() - began
        service.wait_until_idle()
    growth_mb, later_growth_mb = (max(0.0, (peak.num_bytes - each) / 1e6) for each in (start_bytes, first_bytes))
    found = {
        "items": size.num_items,
        "body_mb": round(num_bytes / 1e6, 1),
        "took_s": round(took_s, 1),
        "start_mb": round(start_bytes / 1e6, 1),
        "first_batch_mb": round(first_bytes / 1e6, 1),
        "peak_mb": round(peak.num_bytes / 1e6, 1),
        "growth_mb": round(growth_mb, 1),
        "later_growth_mb": round(later_growth_mb, 1),
    }
    assert growth_mb < size.most_growth_mb, found
    assert later_growth_mb < size.most_later_growth_mb, found
    return found


def ask(service: Service, size: Size) -> int:
    """Send a batch while its answers are read; each item must have one. Returns the bytes of the body."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(GUARD_S)
        sock.connect(str(service.socket_path))
        sent = Sender(sock, size)
        sent.start()
        status, lines = read_lines(sock)
        assert status == 200, status
        seen = bytearray(size.num_items)
        last: dict[str, Any] = {}
        for line in lines:
            last = json.loads(line)
            if not last["done"]:
                assert "error" not in last, last
                assert last["id"] == f"item {last['item']}", last
                seen[last["item"]] += 1
        sent.join()
        assert seen == bytes([1]) * size.num_items, "items without an answer, or with several"
        assert last == {"done": True, "n": size.num_items, "failed": 0}, last
        return sent.num_bytes


class Sender(threading.Thread):
    """Writes the request, as fast as it is taken."""

    def __init__(self, sock: socket.socket, size: Size) -> None:
        super().__init__()
        self._sock = sock
        self._size = size
        self.num_bytes = 0

    def run(self) -> None:
        self._sock.sendall(HEAD)
        for data in self._pieces():
            self._sock.sendall(b"%x\r\n%b\r\n" % (len(data), data))
            self.num_bytes += len(data)
        self._sock.sendall(b"0\r\n\r\n")

    def _pieces(self) -> Iterator[bytes]:
        rng = random.Random(self._size.seed)
        for number in range(self._size.num_items):
            words = some_words(rng, self._size.item_bytes // WORD_BYTES)
            prompt = (words * 2)[: self._size.item_bytes]
            item = {"id": f"item {number}", "prompt": prompt, "max_tokens": self._size.max_tokens, "cache": False}
            yield (b"," if number else b"[") + json.dumps(item).encode()
        yield b"]"


def read_lines(sock: socket.socket) -> tuple[int, Iterator[bytes]]:
    """Status and lines of a response in chunks."""
    file = sock.makefile("rb")
    status = int(file.readline().split()[1])
    while file.readline().strip():
        pass

    def lines() -> Iterator[bytes]:
        rest = b""
        with closing(file):
            while length := int(file.readline(), 16):
                *whole, rest = (rest + file.read(length)).split(b"\n")
                yield from whole
                file.readline()
        assert not rest

    return status, lines()


class Peak:
    """The most memory of its own that a process was seen to have, looked at in a thread."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.num_bytes = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            self.num_bytes = max(self.num_bytes, anonymous_bytes(self._pid))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fields = dataclasses.fields(Size)
    for each in fields:
        flag = "--" + each.name.removeprefix("num_").replace("_", "-")
        parser.add_argument(flag, type=type(each.default), default=each.default, dest=each.name)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-batch-") as folder:
        found = run(Path(folder), Size(**{each.name: getattr(given, each.name) for each in fields}))
        print(json.dumps({"soak": "batch", **found}), flush=True)


if __name__ == "__main__":
    main()
