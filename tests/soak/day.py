"""A day in the life of a daemon that is left alone: nothing leaks, no session is lost, no stream is stuck.

    scripts/soak day [--requests 20000] [--package PACKAGE]

Each of the hours is as many requests of all kinds, good and bad, over the socket and HTTP; clients hang up and are
killed, and all the while the configuration is changed and read again, sometimes a broken one. In every third hour the
disk of state and cache, a small one, is full at first; in every third another process takes memory. After each hour the
model sleeps and the memory of the daemon is looked at; the next hour wakes it. At the end the daemon is killed: what it
said is saved must be there again, to the letter.

Root is needed for the small disk; `--disk-mb 0` goes without full ones.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.soak import kill9, memory, mixed
from tests.soak.command import run_with_models
from tests.soak.line import Line
from tests.soak.reference import GREEDY, user
from tests.soak.service import GUARD_S, Model, Service
from tests.soak.weather import Reloads, full_disk, short_memory, small_disk
from tests.soak.words import some_words

POLL_S: Final = 0.05
KV_DISK_CONTEXTS: Final = 3
STATE_MB: Final = 64
"""Beside keys and values: sessions, what was measured."""

ASK: Final = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    sock.sendall(sys.argv[2].encode())
    while sock.recv(1 << 16):
        pass
"""
REQUEST: Final = re.compile(r" INFO request rid=(\S+) .*?\bcode=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`num_keepers` of the clients know all of their sessions. `disk_mb` -1 is as much as keys and values and sessions
    take. Of a request at most `most_slope` bytes may stay, and `most_growth` is a share of what half a day has taken;
    fewer than four hours do not tell. The least that a quarter of a day sees varies by a megabyte, as the heap has it:
    that is 200 bytes of each of its 5,000 requests, and what leaked was always more.
    """

    num_requests: int = 20_000
    num_hours: int = 24
    num_clients: int = 6
    num_keepers: int = 3
    num_words: int = 20
    num_turns: int = 6
    max_tokens: int = 16
    disk_mb: int = -1
    pressure_mb: int = 1024
    reload_s: float = 2.0
    idle_unload_s: float = 1.0
    quiet_s: float = 3.0
    most_slope: float = 250.0
    most_growth: float = 0.05
    seed: int = 1


class Visitor(mixed.Client):
    """One that sends anything; now and then it is a process that is killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds += [self.http_stream, self.http_stream, self.killed]

    def turn(self) -> None:
        """The daemon may hear of a client's end after this asks for the session of it; but hear of it it must."""
        name, words, options = self.name(), self.words(), self.options()
        give_up_at = time.monotonic() + GUARD_S
        while (final := self.line.ask("chat", session=name, prompt=words, **options)).get("error"):
            self.expect(final, "too_long", "session_busy")
            if final["error"]["code"] == "too_long":
                self._may_miss(self.line.ask("session.reset", session=name))
                return
            assert time.monotonic() < give_up_at, f"{name} stays busy"
            time.sleep(POLL_S)

    def killed(self) -> None:
        session = {"session": self.name()} if self.rng.random() < 0.5 else {}
        request = {"op": "chat", "prompt": self.words(), "stream": True, "max_tokens": 400, **session}
        command = [sys.executable, "-ISc", ASK, str(self.service.socket_path), json.dumps(request) + "\n"]
        with subprocess.Popen(command) as process:
            time.sleep(self.rng.uniform(0.0, 0.3))
            process.kill()

    def http_stream(self) -> None:
        body = {"messages": [user(self.words())], "max_tokens": self.size.max_tokens, "stream": True}
        answer = self._post(body)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert answer.count(b"data: [DONE]") == 1, answer


@dataclass(eq=False)
class Keeper(kill9.Talker):
    """One that knows all that was said in its sessions, and which of it was acknowledged as saved."""

    num_unsaved: int = 0
    is_saved: bool = True

    def turn(self, line: Line) -> dict[str, Any]:
        if len(self.messages) >= 2 * self.size.num_turns:
            self._begin_anew(line)
        question = f"{self.number} {some_words(self.rng, self.rng.randint(2, self.size.num_words))}"
        options = {"max_tokens": self.size.max_tokens, "if_rev": len(self.messages) // 2, **GREEDY}
        final = line.must("chat", session=self.session, prompt=question, **options)
        self.in_flight = question
        self._keep(final["text"])
        self.num_kept += 1
        self.is_saved = final.get("saved", True)
        self.num_unsaved += not self.is_saved
        return final

    def run(self, service: Service, num_turns: int) -> None:
        """So many turns; what the daemon has must be what was said, whether it could be saved or not."""
        with service.line() as line:
            self.check(line)
            for _ in range(num_turns):
                self.turn(line)
            self.check(line)
            line.check_silence()


@dataclass(eq=False)
class Day:
    """The daemon, those who come to it, and what was seen."""

    service: Service
    size: Size
    reloads: Reloads
    visitors: list[Visitor]
    keepers: list[Keeper]
    num_full: int = 0
    num_short: int = 0
    asleep_bytes: list[int] = field(default_factory=list)
    awake_bytes: list[int] = field(default_factory=list)

    def hour(self, number: int) -> None:
        share = self.size.num_requests // self.size.num_hours // 2
        self.reloads.reload(is_broken=False)
        with self.reloads.now_and_then(self.size.reload_s):
            with self._weather(number):
                self._requests(share)
            self._requests(share)
        self._all_saved()
        self._look()

    @contextlib.contextmanager
    def _weather(self, number: int) -> Iterator[None]:
        if number % 3 == 1 and self.size.disk_mb:
            self.num_full += 1
            with full_disk(self.service.state):
                yield
        elif number % 3 == 2:
            self.num_short += 1
            with short_memory(self.size.pressure_mb):
                yield
        else:
            yield

    def _requests(self, num_requests: int) -> None:
        share = -(-num_requests // (len(self.visitors) + len(self.keepers)))
        with ThreadPoolExecutor(len(self.visitors) + len(self.keepers)) as pool:
            running = [pool.submit(each.run, share) for each in self.visitors]
            running += [pool.submit(each.run, self.service, share) for each in self.keepers]
            for each in running:
                each.result()

    def _all_saved(self) -> None:
        """With room on the disk the next turn takes what was not saved with it."""
        with self.service.line() as line:
            for keeper in self.keepers:
                keeper.turn(line)
                assert keeper.is_saved, f"{keeper.session}: there is room again, and a turn is not saved"

    def _look(self) -> None:
        stats = self.service.wait_until_idle()
        assert stats["conns"] == len(self.visitors) + 1, stats  # the one that asks
        self.awake_bytes.append(self.service.resident_bytes - stats["kv_bytes"])
        give_up_at = time.monotonic() + GUARD_S
        with self.service.line() as line:
            while line.must("health")["state"] != "asleep":
                assert time.monotonic() < give_up_at, "the model does not fall asleep"
                time.sleep(POLL_S)
        looks: list[int] = []
        give_up_at = time.monotonic() + self.size.quiet_s  # until what was freed is given back
        while not looks or time.monotonic() < give_up_at:
            looks.append(self.service.resident_bytes)
            time.sleep(POLL_S)
        self.asleep_bytes.append(min(looks))


def run(folder: Path, model: Model, size: Size) -> dict[str, Any]:
    """Raises AssertionError if anything is wrong; else what there was to see."""
    kv_disk_mb = model.memory_mb(KV_DISK_CONTEXTS * mixed.CONTEXT)
    if size.disk_mb < 0:
        size = replace(size, disk_mb=kv_disk_mb + STATE_MB)
    config = folder / "edgeqwen.toml"
    settings: dict[str, Any] = {"kv_slots": mixed.NUM_SLOTS, "kv_context": mixed.CONTEXT, "kv_disk_mb": kv_disk_mb}
    settings["kv_memory_mb"] = model.memory_mb(3 * mixed.CONTEXT)
    settings["service_cache_dir"] = str(folder / "state" / "cache")
    model = replace(model, flags=(*model.flags, "--config", str(config)))
    with small_disk(folder / "state", size.disk_mb), contextlib.ExitStack() as at_end:
        service = Service(folder, model, **settings)
        rng = random.Random(size.seed)
        reloads = Reloads(service, config, random.Random(rng.random()), lambda rng: _settings(size, rng))
        service.start()
        at_end.callback(service.kill)
        service.wait_until_ready()
        day = Day(service, size, reloads, _visitors(service, size, rng), _keepers(size, rng))
        for visitor in day.visitors:
            at_end.callback(visitor.hang_up_for_good)
        for number in range(size.num_hours):
            day.hour(number)
        ends = _check_ends(day)
        service.kill()
        num_checked = _come_back(day)
        service.stop()
    return _found(day, model, ends, num_checked)


def _settings(size: Size, rng: random.Random) -> str:
    """A configuration of keys that are live."""
    return (
        f"[service]\nidle_unload_s = {size.idle_unload_s * rng.uniform(1, 2):.3f}\n"
        f"[limits]\ndefault_max_tokens = {rng.randint(1000, 2000)}\n"
        f"[kv]\nsettle = {rng.choice(['true', 'false'])}\ndaily_writes_mb = {rng.choice([1 << 19, 1 << 20])}\n"
    )


def _visitors(service: Service, size: Size, rng: random.Random) -> list[Visitor]:
    visiting = mixed.Size(num_words=size.num_words, max_tokens=size.max_tokens)
    return [Visitor(number, service, visiting, random.Random(rng.random())) for number in range(size.num_clients)]


def _keepers(size: Size, rng: random.Random) -> list[Keeper]:
    keeping = kill9.Size(num_words=size.num_words, num_turns=size.num_turns, max_tokens=size.max_tokens)
    return [Keeper(100 + number, random.Random(rng.random()), keeping) for number in range(size.num_keepers)]


def _check_ends(day: Day) -> Counter[str]:
    """Each request that was accepted was told once, and none failed in the engine; outcome -> requests."""
    log = day.service.log
    ends = REQUEST.findall(log)
    stats = day.service.wait_until_idle()
    assert len({rid for rid, _ in ends}) == len(ends), "a request was told twice"
    assert stats["totals"]["errors"] == 0, stats["totals"]
    assert "Traceback" not in log, log
    day.reloads.check()
    return Counter(outcome for _, outcome in ends)


def _come_back(day: Day) -> int:
    """A new daemon over what the killed one had on disk; returns the messages that were compared."""
    day.service.start()
    day.service.wait_until_ready()
    with day.service.line() as line:
        for keeper in day.keepers:
            keeper.check(line)
            keeper.turn(line)
    return sum(len(keeper.messages) for keeper in day.keepers)


def _found(day: Day, model: Model, ends: Counter[str], num_checked: int) -> dict[str, Any]:
    size = day.size
    num_turns = sum(each.num_kept for each in day.keepers)
    counts = sum((each.counts for each in day.visitors), Counter(keeper_turn=num_turns))
    found: dict[str, Any] = {
        "model": model.name,
        "requests": counts.total(),
        "kinds": dict(counts),
        "ends": dict(ends),
        "reloads": [day.reloads.num_good, day.reloads.num_broken],
        "full_disks": day.num_full,
        "turns_that_could_not_be_saved": sum(each.num_unsaved for each in day.keepers),
        "memory_pressures": day.num_short,
        "messages_after_the_kill": num_checked,
        "awake_mb": [round(each / (1 << 20), 1) for each in day.awake_bytes],
        "asleep_mb": [round(each / (1 << 20), 1) for each in day.asleep_bytes],
    }
    if size.num_hours >= memory.QUARTERS:
        found["growth"] = round(memory.growth(day.asleep_bytes), 4)
        found["slope"] = round(memory.slope(day.asleep_bytes, counts.total() / size.num_hours), 1)
        assert found["growth"] <= size.most_growth, found
        assert found["slope"] <= size.most_slope, found
    return found


if __name__ == "__main__":
    run_with_models("day", __doc__, Size(), run)
