"""`edgeqwen chat`: a conversation at the terminal. It is kept here and sent whole with each turn, or (`--session`) kept
by the daemon, which is sent what is new.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from edgeqwen.cli.ask import Screen, in_words, show, speeds
from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.sessions import session_ref, warn_unless_saved
from edgeqwen.cli.streams import valid_text
from edgeqwen.errors import EdgeqwenError

PROMPT: Final = "> "
HELP: Final = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C cuts an answer short"
HISTORY_LEN: Final = 1000
COMMAND: Final = re.compile(r"/[a-z]+")
"""A line that looks like one of the commands; a question that starts with a path has more in it."""


@click.command("chat")
@socket_option
@click.option("--think/--no-think", default=None, help="Let the model think first, or not. Default: its template's.")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--session", metavar="NAME", help="Go on with this conversation, or begin it; the daemon keeps it.")
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Tokens and speeds after each answer.")
def command(
    socket_path: str | None, *, think: bool | None, system: str | None, session: str | None, is_verbose: bool
) -> None:
    """Talk with the model. /help says what else there is."""
    from edgeqwen.client import Client

    path = socket_to_connect_to(socket_path)
    with Client.connect(path):  # a daemon that is not there should be told before the first line is typed
        pass
    if session is None:
        conversation = Conversation(path, think=think, system=system, is_verbose=is_verbose)
    else:
        conversation = KeptConversation(path, session, think=think, system=system, is_verbose=is_verbose)
    with _line_editing():
        if sys.stdin.isatty():
            click.echo(HELP, err=True)
        for line in _lines():
            if line.strip() == "/quit":
                break
            _handle(line, conversation)


def _handle(line: str, conversation: Conversation) -> None:
    """One line that was typed: a command of ours, or a turn."""
    match line.strip():
        case "":
            return
        case "/help":
            click.echo(HELP, err=True)
        case "/reset":
            _reset(conversation)
        case word if COMMAND.fullmatch(word):
            click.echo(f"edgeqwen: there is no {word}; {HELP}", err=True)
        case _:
            with _complaints():
                conversation.say(line)


def _reset(conversation: Conversation) -> None:
    with _complaints():
        conversation.reset()
        if sys.stdin.isatty():
            click.echo("forgotten", err=True)


@contextlib.contextmanager
def _complaints() -> Iterator[None]:
    """What the daemon refuses is said, and the conversation goes on."""
    try:
        yield
    except EdgeqwenError as error:
        click.echo(f"edgeqwen: {in_words(error).message}", err=True)


def _lines() -> Iterator[str]:
    """Lines until the end of input; Ctrl-C at the prompt drops the line."""
    prompt = PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            yield valid_text(input(prompt))
        except KeyboardInterrupt:
            click.echo(err=True)
        except EOFError:
            if prompt:
                click.echo(err=True)
            return


class Conversation:
    """Turns so far. A turn that failed leaves no trace; one cut short stays as far as it came."""

    def __init__(self, socket_path: Path, *, think: bool | None, system: str | None, is_verbose: bool) -> None:
        self._socket_path = socket_path
        self._think = think
        self._first: list[dict[str, str]] = []
        if system is not None:
            self._first.append({"role": "system", "content": valid_text(system)})
        self._is_verbose = is_verbose
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = list(self._first)

    def say(self, text: str) -> None:
        """One turn, printed as it comes. Raises what the daemon answers."""
        screen = Screen(ends_line=True)
        messages = [*self.messages, {"role": "user", "content": text}]
        self._turn(messages, screen)
        self.messages = [*messages, {"role": "assistant", "content": "".join(screen.text)}]

    def _turn(self, messages: list[dict[str, str]], screen: Screen, **members: str) -> None:
        """Print an answer. Ctrl-C cuts it short, which hanging up tells the daemon."""
        from edgeqwen.client import Client

        with Client.connect(self._socket_path) as client:
            try:
                frames = client.stream("chat", messages=messages, think=self._think, stream=True, **members)
                final = show(frames, screen)
            except KeyboardInterrupt:
                return
        warn_unless_saved(final)
        if self._is_verbose:
            click.echo(speeds(final), err=True)


class KeptConversation(Conversation):
    """A session of the daemon's. A turn that failed or was cut short leaves no trace."""

    def __init__(
        self, socket_path: Path, session: str, *, think: bool | None, system: str | None, is_verbose: bool
    ) -> None:
        super().__init__(socket_path, think=think, system=system, is_verbose=is_verbose)
        self._session = session_ref(session)

    def reset(self) -> None:
        from edgeqwen.client import Client

        with Client.connect(self._socket_path) as client:
            try:
                client.request("session.reset", session=self._session)
            except EdgeqwenError as error:
                if error.code != "not_found":  # one that was never begun is as good as forgotten
                    raise

    def say(self, text: str) -> None:
        messages = [*self._first, {"role": "user", "content": text}]
        self._turn(messages, Screen(ends_line=True), session=self._session)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Line editing and a history that is kept in the user's state directory, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    history = Path(state) / "edgeqwen" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(HISTORY_LEN)
    try:
        yield
    finally:
        if sys.stdin.isatty():
            with contextlib.suppress(OSError):
                history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                readline.write_history_file(history)
