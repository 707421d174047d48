"""`edgeqwen embed`: texts to vectors, one JSON line for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.streams import read_text, valid_text
from edgeqwen.errors import BadRequest

if TYPE_CHECKING:
    from edgeqwen.client import Client


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


def _embed(client: Client, texts: list[str], pooling: str | None) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Each text and its vector, group by group."""
    from edgeqwen.client.embedding import EmbedJob

    job, left = EmbedJob(texts, pooling), iter(texts)
    while (members := job.next_members()) is not None:
        with job.numbered():
            part = job.add(client.request("embed", **members))
        for vector in part.vectors:
            yield next(left), vector
        if job.needs_limits:
            job.limits = client.request("hello")["limits"]
