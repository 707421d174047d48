"""`edgeqwen sessions`: the conversations that the daemon keeps for the user who asks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.streams import complain, shown, valid_text
from edgeqwen.errors import EXIT_NO_INPUT, EdgeqwenError

if TYPE_CHECKING:
    from edgeqwen.client import Client

T = TypeVar("T")

NOT_SAVED: Final = "the daemon could not save this to disk (its log says why); it is forgotten when the daemon ends"
_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))

json_option = click.option("--json", "is_json", is_flag=True, help="JSON, one object a line.")
name_argument = click.argument("name")


def session_ref(text: str) -> str:
    """How the daemon is to be asked for the session that a user means: what looks like an id is one. A name may have
    the @ before it that the protocol puts there.
    """
    from edgeqwen.sessions.session import is_id

    text = valid_text(text, "the name of the session")
    return text if is_id(text) or text.startswith("@") else f"@{text}"


@contextlib.contextmanager
def named(**names: str) -> Iterator[None]:
    """An error of the daemon's about one of these fields begins with what the user gave for it."""
    try:
        yield
    except EdgeqwenError as error:
        if (name := names.get(error.field or "")) is None:
            raise
        raise error.reworded(f"{shown(name, sys.stderr)}: {error.message}") from error


def warn_unless_saved(frame: dict[str, Any]) -> None:
    """Say on stderr if what the frame is about is in memory only."""
    if frame.get("saved") is False:
        complain(f"edgeqwen: {NOT_SAVED}")


@click.group("sessions", short_help="List, show, fork and remove kept conversations.")
def command() -> None:
    """Conversations that the daemon keeps. NAME is a name or an id; `ask --session NAME` begins or continues one."""


@command.command("list", short_help="What there is.")
@socket_option
@json_option
def list_command(socket_path: str | None, *, is_json: bool) -> None:
    """All of them, the one used last coming first."""
    rows = _call(socket_path, lambda client: client.request("session.list"))["sessions"]
    if is_json:
        for row in rows:
            click.echo(json.dumps(row, ensure_ascii=False))
    elif rows:
        click.echo(f"{'NAME':32} {'TURNS':>6} {'TOKENS':>7} {'USED':>12}")
        for row in rows:
            used = "now" if row["busy"] else f"{duration(row['idle_s'])} ago"
            click.echo(f"{row.get('name', row['session']):32} {row['turns']:6} {row['tokens']:7} {used:>12}")


@command.command("show", short_help="What was said.")
@name_argument
@socket_option
@json_option
def show_command(name: str, *, socket_path: str | None, is_json: bool) -> None:
    """What was said in the session NAME."""
    request = {"session": session_ref(name), "messages": True}
    with named(session=name):
        frame = _call(socket_path, lambda client: client.request("session.get", **request))
    if is_json:
        click.echo(_members(frame))
        return
    turns = "1 turn" if frame["turns"] == 1 else f"{frame['turns']} turns"
    facts = f"revision {frame['rev']}, {turns}, {frame['tokens']} tokens, when full: {frame['overflow']}"
    click.echo(f"{frame.get('name', '')} {frame['session']} ({facts})".lstrip())
    system = [{"role": "system", "content": frame["system"]}] if "system" in frame else []
    for message in (*system, *frame["messages"]):
        content = shown(message["content"], sys.stdout)
        print(f"\n[{message['role']}]\n{content}")  # click's echo would change it in a pipe


@command.command("fork", short_help="Copy one.")
@name_argument
@click.argument("new")
@click.option("--at", type=int, metavar="REV", help="As it was at this revision. Default: as it is.")
@socket_option
@json_option
def fork_command(name: str, *, new: str, at: int | None, socket_path: str | None, is_json: bool) -> None:
    """Begin the session NEW as the session NAME is; prints its id."""
    new = valid_text(new, "the name of the new session").removeprefix("@")
    request = {"session": session_ref(name), "name": new, "at": at}
    with named(session=name, name=new):
        frame = _call(socket_path, lambda client: client.request("session.fork", **request))
    click.echo(_members(frame) if is_json else frame["session"])
    warn_unless_saved(frame)


@command.command("rm", short_help="Forget some.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@socket_option
@json_option
def rm_command(names: tuple[str, ...], *, socket_path: str | None, is_json: bool) -> int:
    """Forget sessions, text and all. Those that cannot be are named, and the others go all the same."""

    def remove(client: Client) -> int:
        exit_code = 0
        for name in names:
            try:
                frame = client.request("session.delete", session=session_ref(name))
            except EdgeqwenError as error:
                if error.code not in {"not_found", "session_busy"}:
                    raise
                complain(f"edgeqwen: {shown(name, sys.stderr)}: {error.message}")
                exit_code = exit_code or (EXIT_NO_INPUT if error.code == "not_found" else error.exit_code)
            else:
                if is_json:
                    click.echo(_members(frame))
                warn_unless_saved(frame)
        return exit_code

    return _call(socket_path, remove)


def _call(socket_path: str | None, use: Callable[[Client], T]) -> T:
    from edgeqwen.client import Client

    with Client.connect(socket_to_connect_to(socket_path)) as client:
        return use(client)


def _members(frame: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in frame.items() if key not in {"id", "done"}}, ensure_ascii=False)


def duration(seconds: int) -> str:
    """In the largest unit that makes it at least one."""
    name, unit = next((each for each in _UNITS if seconds >= each[1]), _UNITS[-1])
    return f"{seconds // unit} {name}"
