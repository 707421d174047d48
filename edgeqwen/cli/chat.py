"""`edgeqwen chat`: a conversation at the terminal. It is kept here and sent whole with each turn, or (`--session`) kept
by the daemon, which is sent what is new.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from edgeqwen.cli.ask import Screen, in_words, show, speeds, warn_if_cut
from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.sessions import named, session_ref, warn_unless_saved
from edgeqwen.cli.streams import read_text, valid_text
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
@click.option("--max-tokens", type=int, metavar="N", help="At most so many tokens an answer.")
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Tokens and speeds after each answer.")
def command(socket_path: str | None, *, session: str | None, **options: Any) -> None:
    """Talk with the model. /help says what else there is."""
    from edgeqwen.client import Client

    path = socket_to_connect_to(socket_path)
    with Client.connect(path):  # a daemon that is not there should be told before the first line is typed
        pass
    settings = ChatSettings(path, **options)
    conversation = Conversation(settings) if session is None else KeptConversation(settings, session)
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
            with _complaints(conversation):
                conversation.say(line)


def _reset(conversation: Conversation) -> None:
    with _complaints(conversation):
        conversation.reset()
        if sys.stdin.isatty():
            click.echo("forgotten", err=True)


@contextlib.contextmanager
def _complaints(conversation: Conversation) -> Iterator[None]:
    """What the daemon refuses is said, and the conversation goes on."""
    try:
        yield
    except EdgeqwenError as error:
        error = in_words(error, session=conversation.session, system=conversation.settings.system)
        click.echo(f"edgeqwen: {error.message}", err=True)


def _lines() -> Iterator[str]:
    """Lines until the end of input; Ctrl-C at the prompt drops the line. Raises `EdgeqwenError` for one that is no
    text, unless somebody is there to type another.
    """
    prompt = PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            yield _typed_line() if prompt else _piped_line()
        except EdgeqwenError as error:
            if not prompt:
                raise
            click.echo(f"edgeqwen: {error.message}", err=True)
        except KeyboardInterrupt:
            click.echo(err=True)
        except EOFError:
            if prompt:
                click.echo(err=True)
            return


def _typed_line() -> str:
    try:
        return valid_text(input(PROMPT), "this line")
    except UnicodeDecodeError as error:
        raise EdgeqwenError("this line is not UTF-8 text", code="bad_utf8") from error


def _piped_line() -> str:
    if not (line := sys.stdin.buffer.readline()):
        raise EOFError
    return read_text(line, "a line of standard input").rstrip("\r\n")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What counts for every turn. `think` and `max_tokens` None leave it to the model and the daemon."""

    socket_path: Path
    think: bool | None = None
    system: str | None = None
    max_tokens: int | None = None
    is_verbose: bool = False


class Conversation:
    """Turns so far. A turn that failed leaves no trace; one cut short stays as far as it came."""

    def __init__(self, settings: ChatSettings) -> None:
        self.settings = settings
        self.session: str | None = None
        self._first: list[dict[str, str]] = []
        if settings.system is not None:
            self._first.append({"role": "system", "content": valid_text(settings.system, "--system")})
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = list(self._first)

    def say(self, text: str) -> None:
        """One turn, printed as it comes. Raises what the daemon answers."""
        screen = Screen()
        messages = [*self.messages, {"role": "user", "content": text}]
        self._turn(messages, screen)
        self.messages = [*messages, {"role": "assistant", "content": "".join(screen.text)}]

    def _turn(self, messages: list[dict[str, str]], screen: Screen, **members: str) -> None:
        """Print an answer. Ctrl-C cuts it short, which hanging up tells the daemon."""
        from edgeqwen.client import Client

        settings = self.settings
        with Client.connect(settings.socket_path) as client:
            try:
                frames = client.stream(
                    "chat",
                    messages=messages,
                    think=settings.think,
                    max_tokens=settings.max_tokens,
                    stream=True,
                    **members,
                )
                final = show(frames, screen)
            except KeyboardInterrupt:
                return
        warn_unless_saved(final)
        warn_if_cut(final)
        if settings.is_verbose:
            click.echo(speeds(final), err=True)


class KeptConversation(Conversation):
    """A session of the daemon's. A turn that failed or was cut short leaves no trace."""

    def __init__(self, settings: ChatSettings, session: str) -> None:
        super().__init__(settings)
        self.session = session
        self._ref = session_ref(session)

    def reset(self) -> None:
        from edgeqwen.client import Client

        with self._named(), Client.connect(self.settings.socket_path) as client:
            try:
                client.request("session.reset", session=self._ref)
            except EdgeqwenError as error:
                if error.code != "not_found":  # one that was never begun is as good as forgotten
                    raise

    def say(self, text: str) -> None:
        messages = [*self._first, {"role": "user", "content": text}]
        with self._named():
            self._turn(messages, Screen(), session=self._ref)

    def _named(self) -> contextlib.AbstractContextManager[None]:
        assert self.session is not None
        return named(session=self.session)


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
