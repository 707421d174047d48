"""Taking the text out of a reply of 1 MB: what the client does, against parsing all of it, and against ijson.

    scripts/benchmark reply_text

Two replies: one is nearly all text (some of it escaped, some beyond ASCII), the other has a short text and the
log-probabilities of its tokens. `ours` is `edgeqwen.client.text_of`; `json` and `msgspec` parse the whole reply;
`ijson` stops at the text, fed in pieces of 64 KiB or at once. All of them must find the same text. One JSON line:
medians in milliseconds of rounds in which each had its turn, and what ours is of each whole parse.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import ijson
import msgspec

from edgeqwen.client import text_of

REPLY_BYTES = 1_000_000
NUM_ROUNDS = 31
LIMIT_MS = 1.8
SENTENCE = 'The quick brown fox jumps over 13 lazy dogs, "quoted" and\nin lines; naïve café 龘. '


def frame(members: dict[str, Any]) -> bytes:
    ends = {"finish": "stop", "rid": "r7f3", "usage": {"prompt": 9, "cached": 0, "completion": 300_000}}
    return msgspec.json.encode({"id": 1, "done": True, **members, **ends})


def replies() -> dict[str, bytes]:
    """By what they are made of; each of about `REPLY_BYTES`."""
    size = len(msgspec.json.encode(SENTENCE)) - 2
    entry: dict[str, Any] = {
        "token": 9707,
        "text": " word",
        "logprob": -0.1234567,
        "top": [[9707, -0.1234567], [13, -2.5]],
    }
    num_entries = REPLY_BYTES // (len(msgspec.json.encode(entry)) + len(entry["text"]) + 1)
    return {
        "text": frame({"text": SENTENCE * (REPLY_BYTES // size)}),
        "logprobs": frame({"text": " word" * num_entries, "logprobs": [entry] * num_entries}),
    }


def by_ijson(data: bytes, buf_size: int) -> str:
    for path, _, value in ijson.parse(io.BytesIO(data), buf_size=buf_size):
        if path == "text":
            return str(value)
    raise AssertionError("there is no text")


METHODS: dict[str, Callable[[bytes], str]] = {
    "ours": text_of,
    "json": lambda data: str(json.loads(data)["text"]),
    "msgspec": lambda data: str(msgspec.json.decode(data)["text"]),
    "ijson_64k": lambda data: by_ijson(data, 64 << 10),
    "ijson_whole": lambda data: by_ijson(data, len(data)),
}


def measure(data: bytes) -> dict[str, float]:
    """Milliseconds of each method, medians."""
    expected = json.loads(data)["text"]
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for number in range(NUM_ROUNDS + 1):
        for name, method in METHODS.items():
            began = time.perf_counter()
            found = method(data)
            took = time.perf_counter() - began
            assert found == expected, name
            if number:  # the first warms up
                times[name].append(took * 1e3)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def main() -> None:
    report: dict[str, Any] = {"benchmark": "reply_text", "ijson_backend": ijson.backend}
    slowest = 0.0
    for name, data in replies().items():
        found = measure(data)
        shares = {f"share_of_{name}": round(found["ours"] / found[name], 3) for name in ("json", "msgspec")}
        report[name] = {"bytes": len(data), **found, **shares}
        slowest = max(slowest, found["ours"])
    print(json.dumps({**report, "limit_ms": LIMIT_MS, "is_within": slowest <= LIMIT_MS}))


if __name__ == "__main__":
    main()
