"""`edgeqwen chat`: a conversation at the terminal. The conversation is kept here and sent whole with each turn."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from edgeqwen.cli.ask import Screen, in_words, show, speeds
from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.streams import valid_text
from edgeqwen.errors import EdgeqwenError

if TYPE_CHECKING:
    from edgeqwen.client import Client

PROMPT: Final = "> "
HELP: Final = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C cuts an answer short"
HISTORY_LEN: Final = 1000
COMMAND: Final = re.compile(r"/[a-z]+")
"""A line that looks like one of the commands; a question that starts with a path has more in it."""


@click.command("chat")
@socket_option
@click.option("--think/--no-think", default=None, help="Let the model think first, or not. Default: its template's.")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Tokens and speeds after each answer.")
def command(socket_path: str | None, *, think: bool | None, system: str | None, is_verbose: bool) -> None:
    """Talk with the model. /help says what else there is."""
    from edgeqwen.client import Client

    path = socket_to_connect_to(socket_path)
    with Client.connect(path):  # a daemon that is not there should be told before the first line is typed
        pass
    conversation = Conversation(path, think=think, system=system, is_verbose=is_verbose)
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
            conversation.reset()
            if sys.stdin.isatty():
                click.echo("forgotten", err=True)
        case word if COMMAND.fullmatch(word):
            click.echo(f"edgeqwen: there is no {word}; {HELP}", err=True)
        case _:
            try:
                conversation.say(line)
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
        from edgeqwen.client import Client

        messages = [*self.messages, {"role": "user", "content": text}]
        screen = Screen(ends_line=True)
        with Client.connect(self._socket_path) as client:
            final = self._turn(client, messages, screen)
        self.messages = [*messages, {"role": "assistant", "content": "".join(screen.text)}]
        if self._is_verbose and final is not None:
            click.echo(speeds(final), err=True)

    def _turn(self, client: Client, messages: list[dict[str, str]], screen: Screen) -> dict[str, Any] | None:
        """The final frame; None if the answer was cut short by Ctrl-C, which hanging up tells the daemon."""
        try:
            return show(client.stream("chat", messages=messages, think=self._think, stream=True), screen)
        except KeyboardInterrupt:
            return None


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
