"""What a run of this benchmark is made with: a package, a type of cache, and daemons with one setting or another."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._processes import running_daemon
from benchmarks.conversations.talk import Talk
from edgeqwen.core.model import KVType

MEMORY_MB = 3072
DAILY_WRITES_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """`rerenders`: the template writes a past turn otherwise than it was generated. `profiles` is a folder for what
    daemons measure of the machine, once for all of them. `samples` of everything that is timed. `broken`: figures that
    do not hold.
    """

    package: Path
    kv_type: KVType
    token_bytes: int
    options: Mapping[str, Any]
    rerenders: bool
    samples: int
    threads: int
    profiles: Path
    broken: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def state(self) -> Iterator[Path]:
        """A folder in which daemons keep conversations; nothing is in it but the profile of the machine."""
        with tempfile.TemporaryDirectory(prefix="conversations-") as name:
            for path in self.profiles.glob("*.json"):
                (Path(name) / path.name).write_bytes(path.read_bytes())
            yield Path(name)

    @contextlib.contextmanager
    def daemon(self, state: Path, *, memory_mb: int = MEMORY_MB, settles: bool = True) -> Iterator[Talk]:
        """A daemon that is warm."""
        environ = {
            "EDGEQWEN_KV_MEMORY_MB": str(memory_mb),
            "EDGEQWEN_KV_DISK_MB": str(MEMORY_MB),
            "EDGEQWEN_KV_DAILY_WRITES_MB": str(DAILY_WRITES_MB),
            "EDGEQWEN_KV_SETTLE": str(settles).lower(),
        }
        flags = ["--kv", self.kv_type, *(["--threads", str(self.threads)] if self.threads else [])]
        with running_daemon(self.package, state, *flags, environ=environ) as daemon:
            talk = Talk(daemon, self.options, self.token_bytes)
            for number in range(2):
                talk.turn("generate", prompt=talk.text(100, f"warm {number}"), max_tokens=8, cache=False)
            yield talk
            talk.close()

    def report(self, figure: str, **found: Any) -> None:
        """One line."""
        if not found.get("holds", True):
            self.broken.append(figure)
        given = {"benchmark": "conversations", "package": self.package.name, "kv": self.kv_type}
        print(json.dumps(given | {"figure": figure} | found), flush=True)
