"""Who may use HTTP: the names that the daemon answers to, the pages that may ask, and the keys of network clients.

Values only, and no HTTP library: the daemon reads them at its start.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edgeqwen.errors import ConfigInvalid

NETWORK_OWNER: Final = "tcp"
"""Who owns what network clients do if there are no keys: all of them together."""

MIN_KEY_LEN: Final = 16
OWNER_DIGITS: Final = 32
_KEY: Final = re.compile(r"[!-~]+")
_OPEN_TO_OTHERS: Final = 0o037
"""Mode bits that a file of secrets must not have: its group may read it, and nobody else anything."""


class ApiKeys:
    """Keys, held as digests; the digest of a key is the owner of what is done with it."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._owners: Mapping[bytes, str] = {_digest(key): f"key{_digest(key).hex()[:OWNER_DIGITS]}" for key in keys}

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Keys of a file, one a line; blank lines and those that start with `#` are none. Raises `ConfigInvalid`."""
        name = f"http.api_key_file: {path}"
        try:
            with path.open(encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                text = file.read()
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
            raise ConfigInvalid(f"{name}: cannot read the keys: {reason}") from exc
        if status.st_uid not in {0, os.geteuid()}:
            raise ConfigInvalid(f"{name} belongs to uid {status.st_uid}; it must be root's or the daemon's own user's")
        if mode := stat.S_IMODE(status.st_mode) & _OPEN_TO_OTHERS:
            raise ConfigInvalid(f"{name} is open to others (mode bits {mode:04o}); use chmod 600, or 640 for a group")
        lines = [line.strip() for line in text.splitlines()]
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise ConfigInvalid(f"{name} holds no key; write one into it, at least {MIN_KEY_LEN} characters long")
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_KEY_LEN or not _KEY.fullmatch(key):
                message = f"key {number} must have at least {MIN_KEY_LEN} printable ASCII characters and no spaces"
                raise ConfigInvalid(f"{name}: {message}")
        return cls(keys)

    @property
    def owners(self) -> frozenset[str]:
        """All whose keys there are; who compares them compares the keys."""
        return frozenset(self._owners.values())

    def owner_of(self, key: str) -> str | None:
        """Whose key it is, None if it is none. The time that it takes says nothing of the keys there are."""
        given = _digest(key)
        found: str | None = None
        for digest, owner in self._owners.items():
            if hmac.compare_digest(digest, given):
                found = owner
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAccess:
    """`allowed_hosts` are names, beside those of the loopback, that a network client may call the daemon by (lower
    case, no port). Pages of `allowed_origins` may ask. With `keys`, network clients need one.
    `has_open_metrics`: what the daemon measures of everybody is told to all who may ask anything, not to admins alone.
    """

    allowed_hosts: frozenset[str] = field(default_factory=frozenset)
    allowed_origins: frozenset[str] = field(default_factory=frozenset)
    keys: ApiKeys | None = None
    has_open_metrics: bool = False

    def knows(self, owner: str) -> bool:
        """Whether a network client may be this owner now."""
        return owner == NETWORK_OWNER if self.keys is None else owner in self.keys.owners
