"""Any cut of a valid stream gives the same frames: in the classes that cut streams into frames, and on a connection."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from edgeqwen.client.frames import FrameBuffer
from edgeqwen.protocol.frames import FrameDecoder, decode_object
from edgeqwen.protocol.item_reader import ItemReader
from tests.soak.fuzz_answers import read_responses
from tests.soak.fuzz_mutations import http_bytes, render
from tests.soak.fuzz_seeds import LINES, Call
from tests.soak.fuzz_socket import Place, exchange

NUM_STREAMS: Final = 40
MOST_CUTS: Final = 24
TEXTS: Final = ("Hi 🫠 龘 👩🏽‍🚀", 'a\\"b', "\u2028\x7f", "नमस्ते", "")
VOLATILE: Final = ("rid", "ms", "session", "expires", "created", "uptime_s")

Framing = Callable[[Iterator[bytes]], Any]


def cut(rng: random.Random, data: bytes, num_cuts: int) -> Iterator[bytes]:
    """Pieces of `data`, in order; cuts fall anywhere, also twice in one place."""
    places = sorted(rng.randint(0, len(data)) for _ in range(num_cuts))
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        yield data[start:end]


def by_line(pieces: Iterator[bytes]) -> list[Any]:
    """As the daemon reads requests: it may look for lines after any piece."""
    decoder, found = FrameDecoder(), []
    for piece in pieces:
        decoder.feed(piece)
        found += [decode_object(line) for line in decoder]
    decoder.feed_eof()
    return found + [decode_object(line) for line in decoder]


def by_frame(pieces: Iterator[bytes]) -> list[Any]:
    """As the client reads frames."""
    buffer, found = FrameBuffer(), []
    for piece in pieces:
        buffer.feed(piece)
        while (frame := buffer.take()) is not None:
            found.append(frame)
    return found


def by_item(pieces: Iterator[bytes]) -> list[Any]:
    """As the daemon reads a batch over HTTP."""
    reader = ItemReader()
    found = [item for piece in pieces for item in reader.feed(piece)] + reader.finish()
    assert reader.error is None, reader.error
    return found


def run_in_process(rng: random.Random, num_splits: int) -> int:
    """Cut streams of each kind until there were so many cuts; the number of them."""
    streams: list[tuple[Framing, bytes, Any]] = []
    for _ in range(NUM_STREAMS):
        requests = [{**rng.choice(LINES), "x_text": rng.choice(TEXTS)} for _ in range(rng.randint(1, 4))]
        lines = b"".join(render(each) + rng.choice((b"\n", b"\r\n", b"\n\n")) for each in requests)
        streams.append((by_line, lines.rstrip() if rng.random() < 0.3 else lines, requests))
        frames = [{"id": number, "done": number % 2 == 0, "delta": rng.choice(TEXTS)} for number in range(6)]
        streams.append((by_frame, b"".join(render(each) + b"\n" for each in frames), frames))
        items = [{"prompt": rng.choice(TEXTS), "seed": number} for number in range(5)]
        forms = (render(items), render({"each": "chat", "items": items}), b"\n".join(map(render, items)))
        streams.append((by_item, rng.choice(forms), items))
    num_cut = 0
    while num_cut < num_splits:
        framing, data, expected = rng.choice(streams)
        num_cuts = min(rng.randint(1, MOST_CUTS), num_splits - num_cut)
        state = rng.getstate()
        got = framing(cut(rng, data, num_cuts))
        if got != expected:
            rng.setstate(state)
            raise AssertionError(f"{framing.__name__}: {got} from {list(cut(rng, data, num_cuts))}")
        num_cut += num_cuts
    return num_cut


CONVERSATION: Final = b"".join(
    render(line) + b"\n"
    for line in (
        {"op": "tokenize", "id": 1, "text": TEXTS[0]},
        {"op": "chat", "id": "two", "prompt": TEXTS[0], "max_tokens": 6, "seed": 1, "stream": True},
        {"op": "chat", "prompt": "again", "max_tokens": 3, "seed": 1},
        {"op": "hello"},
        {"op": "colour", "id": 3},
    )
)
CALLS: Final = (
    Call("POST", "/v1/tokenize", {"prompt": TEXTS[0]}),
    Call(
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 4, "seed": 1},
    ),
    Call("POST", "/eqp/chat", {"prompt": TEXTS[3], "max_tokens": 4, "seed": 1, "stream": True}),
    Call("POST", "/eqp/batch", [{"prompt": "a", "max_tokens": 2, "seed": 1}]),
    Call("GET", "/v1/models"),
    Call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "colour": 1}),
)


def run_on_socket(rng: random.Random, place: Place, num_splits: int) -> int:
    """The same of a connection, where each piece has been read before the next is sent; the number of cuts."""
    http = b"".join(
        http_bytes(random.Random(number), call, call.data(), is_last=number == len(CALLS) - 1, is_wrong=False)
        for number, call in enumerate(CALLS)
    )
    streams = [(CONVERSATION, _line_summary), (http, _http_summary)]
    whole = [summary(exchange(place, [data])) for data, summary in streams]
    num_cut = 0
    while num_cut < num_splits:
        which = rng.randrange(2)
        data, summary = streams[which]
        num_cuts = min(rng.choice((1, 2, 8, 64, len(data))), num_splits - num_cut)
        pieces = list(cut(rng, data, num_cuts))
        got = summary(exchange(place, pieces, waits=True))
        assert got == whole[which], f"{got} and not {whole[which]} from {pieces}"
        num_cut += num_cuts
    return num_cut


def _line_summary(got: bytes) -> dict[Any, Any]:
    """By id: the text, joined, and the last frame."""
    found: dict[Any, Any] = {}
    num_without = 0
    for line in got.splitlines():
        if not line:
            continue
        frame = json.loads(line)
        key = frame.get("id", f"without {num_without}")
        num_without += frame["done"] and "id" not in frame
        text, _ = found.get(key, ("", None))
        found[key] = (text + frame.get("delta", ""), _stable(frame) if frame["done"] else None)
    return found


def _http_summary(got: bytes) -> list[Any]:
    found: list[Any] = []
    for response in read_responses(got):
        if response.headers["content-type"] == "application/x-ndjson":
            found.append((response.status, _line_summary(response.body)))
        else:
            found.append((response.status, _stable(json.loads(response.body))))
    return found


def _stable(value: Any) -> Any:
    """Without what differs from one time to the next."""
    if isinstance(value, list):
        return [_stable(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _stable(each) for name, each in value.items() if name not in VOLATILE}
    if "choices" in kept:
        kept.pop("id", None)
    if isinstance(kept.get("usage"), dict):
        for name in ("cached", "prompt_tokens_details"):
            kept["usage"].pop(name, None)
    return kept
