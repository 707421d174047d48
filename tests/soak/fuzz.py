"""Random and mutated requests, as lines and over HTTP, and streams of bytes cut anywhere: the daemon stays well.

    scripts/soak fuzz [--requests 100000] [--splits 1000000] [--clients 8] [--seed 1]

Valid requests of every operation and route are changed in their values and bytes, sent several at once, on the socket
and on a TCP port, with and without a hang-up. Of every connection all that came back is looked at: one last frame for
each request that was taken, nothing after a fatal error, whole responses below 500. Health is asked for all the time.
In the end nothing is left: no descriptor, no reservation, no error in the log, no memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.soak import fuzz_splits, memory
from tests.soak.fuzz_answers import BLANK, check_lines, check_response, read_responses
from tests.soak.fuzz_mutations import MUTATIONS, http_bytes, mutate_bytes, mutate_value, render
from tests.soak.fuzz_seeds import EXPECTED_ERRORS, some_call, some_line
from tests.soak.fuzz_socket import Place, exchange, hang_up
from tests.soak.line import Ended
from tests.soak.service import Service, scripted_model

CONTEXT: Final = 384
MOST_LINES: Final = 12
MOST_CALLS: Final = 4
TOO_LARGE: Final = 1 << 20
MOST_GROWTH: Final = 0.08
"""Compiled grammars that are kept, of whatever size they happen to be, and holes in heaps come to 6 %."""

MOST_SLOPE: Final = 100.0
"""Bytes of a request; heaps that are still filling their holes came to 60 at most."""

LATEST_HEALTH_S: Final = 5.0
QUIET_S: Final = 1.0
NUM_TEXTS: Final = 20
TEXT_WORDS: Final = 1000
NUM_LOOKS: Final = 10
POLL_S: Final = 0.05
HEAD_END: Final = b"\r\n\r\n"
SETTINGS: Final[dict[str, Any]] = {
    "kv_context": CONTEXT,
    "limits_default_max_tokens": 24,
    "kv_memory_mb": 4,
    "kv_disk_mb": 4,
    "sessions_per_uid": 24,
    "http_listen": "127.0.0.1:0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`num_splits` are cuts of streams, `num_socket_splits` of them on a connection. Memory is looked at after each of
    `num_parts` of the requests; `most_growth` and `most_slope` are bounds of what `memory` tells of it.
    """

    num_requests: int = 100_000
    num_splits: int = 1_000_000
    num_socket_splits: int = 20_000
    num_clients: int = 8
    num_parts: int = 20
    most_growth: float = MOST_GROWTH
    most_slope: float = MOST_SLOPE
    seed: int = 1


@dataclass(eq=False)
class Client:
    """One that sends anything, connection after connection. `now` is what it sends, to be told if that goes wrong."""

    places: tuple[Place, Place]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    now: bytes = b""

    def run(self, num_requests: int) -> None:
        num_sent = 0
        while num_sent < num_requests:
            kind = self.rng.random()
            if kind < 0.5:
                num_sent += self.lines()
            elif kind < 0.95:
                num_sent += self.calls()
            else:
                num_sent += self.give_up()

    def lines(self) -> int:
        """Some lines, each as it should be or not; in the end perhaps all of it changed once more."""
        rng = self.rng
        is_changed = rng.random() < 0.7
        lines = [self._line(number, is_changed=is_changed) for number in range(rng.randint(1, MOST_LINES))]
        data = b"".join(line + rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \n")) for line in lines)
        if is_changed and rng.random() < 0.2:
            data = rng.choice(MUTATIONS)(rng, data)
        elif rng.random() < 0.1:
            data = data.rstrip(b"\n")
        self.now = data
        got = exchange(self.places[0], [data])
        if b"A" <= data.lstrip(BLANK)[:1] <= b"Z":
            self._check_http(got)
        else:
            codes = check_lines(data, got)
            assert is_changed or not codes.keys() - EXPECTED_ERRORS - {"well"}, (codes, got)
            self.counts.update(codes)
        return len(lines)

    def calls(self) -> int:
        """Some HTTP requests one behind the other, on either listener."""
        rng = self.rng
        is_stranger, is_changed = rng.random() < 0.3, rng.random() < 0.7
        calls = [some_call(rng, is_stranger=is_stranger) for _ in range(rng.randint(1, MOST_CALLS))]
        data = b""
        for number, call in enumerate(calls):
            body = self._body(call.body) if is_changed and rng.random() < 0.6 else call.data()
            is_wrong = is_changed and rng.random() < 0.4
            data += http_bytes(rng, call, body, is_last=number == len(calls) - 1, is_wrong=is_wrong)
        if is_changed and rng.random() < 0.15:
            data = rng.choice(MUTATIONS)(rng, data)
        self.now = data
        place = self.places[is_stranger]
        # Over TCP the end of input is a hang-up: answers may be torn.
        got = exchange(place, [data], ends=is_changed or not is_stranger)
        begins_http = b"A" <= data.lstrip(BLANK)[:1] <= b"Z"
        if is_changed and (is_stranger or not begins_http):
            self.counts["http, anything"] += 1
            assert not re.match(rb"HTTP/1.[01] 5", got), got
        else:
            statuses = self._check_http(got)
            assert is_changed or len(statuses) == len(calls), (statuses, got)
        return len(calls)

    def give_up(self) -> int:
        """Hang up on requests of either kind."""
        rng = self.rng
        if rng.random() < 0.5:
            data = b"".join(self._line(number, is_changed=False) + b"\n" for number in range(4))
            num_requests, place = 4, self.places[0]
        else:
            call = some_call(rng, is_stranger=False)
            data = http_bytes(rng, call, call.data(), is_last=False, is_wrong=False)
            num_requests, place = 1, rng.choice(self.places)
        self.now = data
        hang_up(place, data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data, rng)
        self.counts["hang-ups"] += num_requests
        return num_requests

    def _line(self, number: int, *, is_changed: bool) -> bytes:
        line = some_line(self.rng, number)
        if not is_changed or self.rng.random() < 0.3:
            return render(line)
        if self.rng.random() < 0.002:
            return render({**line, "x_large": "x" * (TOO_LARGE + self.rng.randint(-200, 200))})
        data = render(mutate_value(self.rng, line))
        return mutate_bytes(self.rng, data) if self.rng.random() < 0.2 else data

    def _body(self, body: Any) -> bytes:
        data = body if isinstance(body, bytes) else render(mutate_value(self.rng, body))
        return mutate_bytes(self.rng, data) if self.rng.random() < 0.3 else data

    def _check_http(self, got: bytes) -> list[str]:
        responses = read_responses(got, may_be_head=b"HEAD" in self.now)
        statuses = [check_response(response) for response in responses]
        self.counts.update(statuses)
        return statuses


class HealthWatch:
    """Asks for health all the time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_looks = 0
        self.latest_s = 0.0
        self.problem: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()
        assert self.problem is None, self.problem
        assert self.latest_s < LATEST_HEALTH_S, f"health took {self.latest_s:.1f} s"

    def _run(self) -> None:
        try:
            with self._service.line() as line:
                while not self._is_over.wait(0.05):
                    began = time.monotonic()
                    frame = line.must("health")
                    assert frame["ok"], frame
                    self.latest_s = max(self.latest_s, time.monotonic() - began)
                    self.num_looks += 1
        except (AssertionError, Ended, OSError) as error:
            self.problem = error


def run(folder: Path, size: Size) -> dict[str, Any]:
    """Raises AssertionError if anything is wrong; else what there was to see."""
    rng = random.Random(size.seed)
    num_cut = fuzz_splits.run_in_process(rng, size.num_splits - size.num_socket_splits)
    model = scripted_model(folder / "model", records=False)
    with Service(folder / "daemon", model, **SETTINGS) as service:
        places = (Place(service.socket_path), Place(service.socket_path, _port(service)))
        num_cut += fuzz_splits.run_on_socket(rng, places[0], size.num_socket_splits)
        clients = [Client(places, random.Random(rng.random())) for _ in range(size.num_clients)]
        _fill_memory_of_words(service, rng)
        looks: list[tuple[int, Counter[str]]] = []
        with HealthWatch(service) as watch:
            for _ in range(size.num_parts):
                _run_all(service, clients, size.num_requests // size.num_parts)
                looks.append(_look(service))
        resident = [num_bytes for num_bytes, _ in looks]
        growth, slope = memory.growth(resident), memory.slope(resident, size.num_requests / size.num_parts)
        found = {
            "seed": size.seed,
            "splits": num_cut,
            "resident_mb": [round(num_bytes / 1e6, 1) for num_bytes in resident],
            "growth": round(growth, 4),
            "bytes_per_request": round(slope, 1),
            "health_looks": watch.num_looks,
            "health_latest_s": round(watch.latest_s, 3),
            "answers": dict(sum((client.counts for client in clients), Counter[str]())),
        }
        assert looks[-1][1] == looks[0][1], (looks[-1][1], looks[0][1])
        assert growth <= size.most_growth, found
        assert slope <= size.most_slope, found
        _check_end(service)
    wrong = [line for line in service.log.splitlines() if re.search(r"ERROR|Traceback|Exception|internal", line)]
    assert not wrong, wrong[:5]
    return found


def _fill_memory_of_words(service: Service, rng: random.Random) -> None:
    """The tokenizer keeps the last 10,000 words or so, which random requests would bring together only in the end."""
    with service.line() as line:
        for _ in range(NUM_TEXTS):
            line.must("tokenize", text=" ".join(rng.randbytes(24).hex() for _ in range(TEXT_WORDS)))


def _port(service: Service) -> int:
    found = re.search(r"listening http=\S+:(\d+) ", service.log)
    assert found is not None, service.log
    return int(found[1])


def _run_all(service: Service, clients: list[Client], num_requests: int) -> None:
    share = -(-num_requests // len(clients))
    with ThreadPoolExecutor(len(clients)) as pool:
        for client, result in [(client, pool.submit(client.run, share)) for client in clients]:
            error = result.exception()
            if error is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                raise AssertionError(f"{error!r} after {client.now[:4000]!r}; log: {service.log[-2000:]}") from error


def _look(service: Service) -> tuple[int, Counter[str]]:
    """Resident bytes less keys and values, and descriptors, when all is quiet."""
    service.wait_until_idle()
    time.sleep(QUIET_S)
    stats = service.wait_until_idle()
    assert stats["conns"] == 2, stats  # the one that asks, and the one that watches
    looks = []
    for _ in range(NUM_LOOKS):  # the daemon may not have closed yet what asked last
        time.sleep(POLL_S)
        looks.append(service.descriptors())
    return service.resident_bytes - stats["kv_bytes"], min(looks, key=Counter.total)


def _check_end(service: Service) -> None:
    """All slots are free, and no session is busy."""
    with service.line() as line:
        assert not any(each["busy"] for each in line.must("session.list")["sessions"])
        ids = [line.send("generate", tokens=[5], max_tokens=8, ignore_eos=True) for _ in range(8)]
        frames = [line.read() for _ in ids]
        assert sorted(frame["id"] for frame in frames) == ids
        assert all(frame["finish"] == "length" for frame in frames), frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fields = dataclasses.fields(Size)
    for each in fields:
        flag = "--" + each.name.removeprefix("num_").replace("_", "-")
        parser.add_argument(flag, type=type(each.default), default=each.default, dest=each.name)
    given = parser.parse_args()
    size = Size(**{each.name: getattr(given, each.name) for each in fields})
    print(json.dumps({"soak": "fuzz", "seed": size.seed}), flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-fuzz-") as folder:
        found = run(Path(folder), size)
    print(json.dumps({"soak": "fuzz", "took_s": round(time.monotonic() - began), **found}), flush=True)


if __name__ == "__main__":
    main()
