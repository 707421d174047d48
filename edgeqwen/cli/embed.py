"""`edgeqwen embed`: texts to vectors, one JSON line for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.streams import read_text, valid_text
from edgeqwen.errors import BadRequest, EdgeqwenError

if TYPE_CHECKING:
    from edgeqwen.client import Client

MOST_TEXTS: Final = 64
"""The daemon takes no more at once."""

NUMBER_BYTES: Final = 11
REST_BYTES: Final = 2048


@click.command("embed")
@click.argument("texts", nargs=-1)
@socket_option
@click.option("--pooling", metavar="KIND", help="last or mean. Default: the model's.")
def command(texts: tuple[str, ...], *, socket_path: str | None, pooling: str | None) -> None:
    """Vectors of the TEXTS; without any, of the lines on stdin. Each is a line `{"text":...,"embedding":[...]}`."""
    wanted = [valid_text(text, "a text") for text in texts] or _lines()
    if not wanted:
        raise BadRequest("nothing to embed: give texts as arguments or lines on stdin")
    from edgeqwen.client import Client

    with Client.connect(socket_to_connect_to(socket_path)) as client:
        for text, vector in _embed(client, wanted, pooling):
            print(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False, separators=(",", ":")))
            sys.stdout.flush()


def _lines() -> list[str]:
    """Those on stdin that are not blank."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    lines = read_text(sys.stdin.buffer.read(), "standard input").splitlines()
    return [line for line in lines if line.strip()]


def _embed(client: Client, texts: list[str], pooling: str | None) -> Iterator[tuple[str, list[float]]]:
    """Each text and its vector: the first by itself, which tells how many a reply holds."""
    start, count = 0, 1
    reply_bytes = client.request("hello")["limits"]["reply"]
    while start < len(texts):
        part = texts[start : start + count]
        frame: dict[str, Any] = client.request("embed", texts=part, pooling=pooling)
        if "embeddings" not in frame:
            raise EdgeqwenError(f"the embedding ended before its end: {frame.get('finish')}", code="draining")
        yield from zip(part, frame["embeddings"], strict=True)
        start += count
        count = max(1, min(MOST_TEXTS, (reply_bytes - REST_BYTES) // (NUMBER_BYTES * frame["dims"] + 1)))
