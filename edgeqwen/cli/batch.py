"""`edgeqwen batch`: a file of requests in, a file of answers out, one line each, as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.progress import progress_bar
from edgeqwen.cli.streams import complain
from edgeqwen.errors import BadRequest

if TYPE_CHECKING:
    from edgeqwen.cli.batch_run import Tally


@click.command("batch", short_help="Answer a file of requests.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Answers, one JSON object a line; - is stdout."
)
@socket_option
@click.option("--op", type=click.Choice(["chat", "generate", "embed"]), default="chat", help="Default: chat.")
@click.option("--common", "settings", multiple=True, metavar="KEY=VALUE", help="A member of every request; repeatable.")
@click.option("--max-tokens", type=int, metavar="N", help="At most so many tokens each.")
@click.option("--temperature", type=float, metavar="T", help="0 is greedy. Default: the model's.")
@click.option("--think/--no-think", default=None, help="Let the model think first, or not. Default: its template's.")
@click.option("--in-flight", type=click.IntRange(1, 8), default=8, metavar="N", help="Requests at once. Default: 8.")
@click.option("--patience", type=float, default=120.0, metavar="S", help="Seconds to wait for a daemon that is gone.")
def command(
    file: Path, *, out: Path, socket_path: str | None, op: str, settings: tuple[str, ...], in_flight: int, **given: Any
) -> int:
    """Answer every request in FILE: a JSON array or JSON lines of objects, each with the members of a chat, such as
    {"id": "a", "prompt": "Hi"}. FILE may be -, standard input.

    Each line of the output has the item's `id`, or its `index` if it has none, and its answer or error. What is in the
    output file already is not asked again, so a run that was interrupted goes on where it was; with --out - all are.
    """
    import asyncio

    from edgeqwen.cli.batch_run import BatchJob, run

    patience_s = given.pop("patience")
    common = {**read_settings(settings), **{name: value for name, value in given.items() if value is not None}}
    job = BatchJob(
        file=file,
        out=out,
        socket_path=socket_to_connect_to(socket_path),
        op=op,
        common=common,
        in_flight=in_flight,
        patience_s=patience_s,
    )
    with progress_bar(file.name) as show:
        tally = asyncio.run(run(job, show))
    complain(summary(tally))
    return tally.exit_code


def read_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """`KEY=VALUE`; a value that is no JSON is text."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, sign, text = setting.partition("=")
        if not sign or not name:
            raise BadRequest("--common takes KEY=VALUE, such as max_tokens=64")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def summary(tally: Tally) -> str:
    parts = [f"{tally.num_answered} answered"]
    if tally.num_failed:
        parts.append(f"{tally.num_failed} failed")
    if tally.num_skipped:
        parts.append(f"{tally.num_skipped} were there before")
    return f"edgeqwen: {', '.join(parts)}"
