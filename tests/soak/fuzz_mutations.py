"""Changes that make a valid request another one, mostly a wrong one: of values, of bytes, and of what HTTP adds."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.soak.fuzz_seeds import Call

RAW: Final = "<<<%d>>>"
"""Stands in a value for one of `RAW_VALUES`, which `json` would not write."""

RAW_VALUES: Final = (
    b"NaN", b"-Infinity", b"1e400", b"-1e400", b"1e-400", b"9" * 40, b"9" * 5000, b"-0", b"01", b"1.", b"tru",
    b'"\\ud800"', b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\x80"', b'"a\x00b"', b'"\\u0000"', b"'a'", b"", b"{", b"]",
)  # fmt: skip
VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2, 7, 64, 65, 255, 256, 511, 512, 513, 65_536, 2**31, 2**53, 2**63 - 1, 2**63, 2**64,
    -(2**63), 1e308, 1e-300, 0.1, -0.5, 2.0, "", " ", "a", "@", "@one", "1", "low", "json_object", "<think>",
    "\x00\x1b[31m", "<|im_end|>", "漢" * 40, "x" * 2000, [], [[]], {}, {"a": 1}, [1, 2], ["a"], [None],
    [{"role": "user", "content": "a"}],
    {"type": "regex", "regex": "(a|b)*"}, {"type": "grammar", "grammar": "start: /a+/"}, {"type": "json_schema"},
)  # fmt: skip
NAMES: Final = (
    "id", "v", "close", "op", "stream", "n", "stop", "seed", "session", "tools", "tokens", "prompt", "messages",
    "items", "common", "each", "x_mine", "colour", "", "done", "logit_bias", "max_tokens", "if_rev", "wait",
    "deadline_ms", "role",
)  # fmt: skip
BYTES: Final = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xf0\x9f", b"\n", b"\r", b"\r\n\r\n", b'"', b"\\", b"{", b"}", b"[" * 40,
    b"]", b",", b":", b"null", b"GET / HTTP/1.1\r\n\r\n", b'{"op":"health"}\n', b"[" * 3000, b" " * 500,
)  # fmt: skip
HEADERS: Final = (
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 1e3",
    b"Content-Length: 2000000", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: x",
    b"Expect: 100-continue", b"Expect: something", b"Host: ", b"Host: evil.example", b"Origin: http://evil.example",
    b"Origin: null", b"Sec-Fetch-Site: cross-site", b"Connection: close", b"Connection: upgrade\r\nUpgrade: websocket",
    b"Connection: keep-alive", b"Content-Encoding: gzip", b"Content-Encoding: br", b"Content-Type: text/plain",
    b"Content-Type: application/x-ndjson", b"Content-Type: application/json; charset=utf-16",
    b"Authorization: Bearer x",
    b"X: " + b"y" * 9000, b"X : y", b": y", b"X\x00: y", b"X: \xff", b"no colon", b" folded: x", b"Cookie: a=b",
)  # fmt: skip
MOST_NODES: Final = 200


def render(value: Any) -> bytes:
    """JSON, with raw values put in their places."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    for number, raw in enumerate(RAW_VALUES):
        data = data.replace(b'"' + (RAW % number).encode() + b'"', raw)
    return data


def mutate_value(rng: random.Random, value: Any) -> Any:
    """A copy with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(itertools.islice(_places(value), MOST_NODES))
        if not places:
            return _other(rng, value)
        holder, key = rng.choice(places)
        _change(rng, holder, key)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _change(rng: random.Random, holder: Any, key: Any) -> None:
    what = rng.randrange(8)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[rng.choice(NAMES)] = holder[key] if rng.random() < 0.3 else _other(rng, holder[key])
    elif what == 2 and isinstance(holder, list):
        holder.extend([holder[key]] * rng.choice((1, 2, 70, 300)))
    elif what == 3 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        holder[key] = holder[key] * rng.choice((-1, 2, 100, 0.5)) + rng.choice((-1, 0, 1))
    elif what == 4 and isinstance(holder[key], str):
        at = rng.randint(0, len(holder[key]))
        holder[key] = holder[key][:at] + str(rng.choice(VALUES)) + holder[key][at:]
    else:
        holder[key] = _other(rng, holder[key])


def _other(rng: random.Random, value: Any) -> Any:
    what = rng.randrange(10)
    if what == 0:
        for _ in range(rng.choice((1, 3, 27, 29, 31, 33, 60))):
            value = [value] if rng.random() < 0.5 else {"a": value}
            value = copy.copy(value)
        return value
    if what <= 3:
        return RAW % rng.randrange(len(RAW_VALUES))
    return copy.deepcopy(rng.choice(VALUES))


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four changes of bytes: flipped, cut, doubled, put in, taken from elsewhere."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randint(0, len(data)) for _ in range(2))
        what = rng.randrange(7)
        if what == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif what == 1:
            data = data[:at]
        elif what == 2:
            data = data[:at] + data[end:]
        elif what == 3:
            data = data[:end] + data[at:]
        elif what == 4:
            data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
        else:
            data = data[:at] + rng.choice(BYTES) + data[at:]
    return data


def http_bytes(rng: random.Random, call: Call, body: bytes, *, is_last: bool, is_wrong: bool) -> bytes:
    """A request with its headers; `is_wrong`: something of them is not as it should be."""
    headers = [b"Host: localhost"]
    if body and rng.random() < 0.3:
        headers.append(b"Transfer-Encoding: chunked")
        body = b"".join(_chunks(rng, body, is_wrong=is_wrong)) + b"0\r\n\r\n"
    elif body or call.method == "POST":
        wrong = rng.choice((-5, -1, 1, 5, 1000)) if is_wrong and rng.random() < 0.3 else 0
        headers.append(b"Content-Length: %d" % (len(body) + wrong))
    if is_last:
        headers.append(b"Connection: close")
    method, path, version = call.method.encode(), call.path.encode(), b"HTTP/1.1"
    if is_wrong:
        for _ in range(rng.randint(0, 3)):
            headers.insert(rng.randint(0, len(headers)), rng.choice(HEADERS))
        what = rng.randrange(8)
        if what == 0:
            method = rng.choice((
                b"GET",
                b"PUT",
                b"HEAD",
                b"OPTIONS",
                b"CONNECT",
                b"TRACE",
                b"PRI",
                b"Post",
                b"X" * 300,
            ))
        elif what == 1:
            path = rng.choice((
                b"*",
                b"/",
                b"//v1/models",
                b"/%ff",
                b"/eqp/",
                b"/eqp/%00",
                b"http://evil/health",
                b"/" + b"a" * 9000,
            ))
        elif what == 2:
            version = rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 x", b"HTTP/1,1", b""))
    return b"%b %b %b\r\n%b\r\n\r\n%b" % (method, path, version, b"\r\n".join(headers), body)


def _chunks(rng: random.Random, body: bytes, *, is_wrong: bool) -> Iterator[bytes]:
    while body:
        size = rng.randint(1, max(1, len(body)))
        piece, body = body[:size], body[size:]
        length = b"%x" % len(piece)
        if is_wrong and rng.random() < 0.3:
            length = rng.choice((
                b"%x" % (len(piece) + 1),
                b"-1",
                b"zz",
                b"",
                b"0",
                b"f" * 20,
                length + b";x=" + b"y" * 50,
            ))
        yield b"%b\r\n%b\r\n" % (length, piece)


MUTATIONS: Final[tuple[Callable[[random.Random, bytes], bytes], ...]] = (
    mutate_bytes,
    lambda rng, data: data + rng.choice(BYTES),
    lambda rng, data: rng.choice(BYTES) + data,
    lambda rng, data: data[: rng.randint(0, len(data))],
)
"""Of a whole stream."""
