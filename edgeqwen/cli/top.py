"""`edgeqwen top`: what the daemon does, live on a terminal, or once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, TO_END_OF_LINE, TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
NO_SIZE: Final = (100, 1000)


class Looks:
    """Asks the daemon again and again, over one connection; makes another when that one ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._client: Any = None
        self._facts: dict[str, Any] = {}

    def look(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What `health`, `stats` and `ready` say now. Raises `EdgeqwenError` if nobody answers."""
        from edgeqwen.client import Client
        from edgeqwen.errors import EdgeqwenError

        if self._client is None:
            self._client, self._facts = Client.connect(self._path), {}
        try:
            health = self._client.health()
            if not self._facts and health["state"] in {"ready", "asleep"}:
                with contextlib.suppress(EdgeqwenError):  # a model that cannot be woken; what else there is, is shown
                    self._facts = self._client.ready()
            return health, self._client.stats(), self._facts
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


@click.command("top", short_help="Show live what the running daemon is doing.")
@socket_option
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, metavar="S", help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="One look, as plain text; so it is where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object a look, until it is ended.")
def command(socket_path: str | None, *, interval: float, once: bool, as_json: bool) -> None:
    """Requests that run and wait, speeds, cache and memory. `q` or Ctrl-C ends it.

    Root, the daemon's own user and the group edgeqwen-admin see everybody's requests, all others their own.
    """
    looks = Looks(socket_to_connect_to(socket_path))
    with contextlib.closing(looks):
        if as_json:
            _print_json(looks, interval, once=once)
        elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            click.echo("\n".join(_lines(looks, *NO_SIZE)))
        else:
            _show(looks, interval)


def _print_json(looks: Looks, interval: float, *, once: bool) -> None:
    while True:
        health, stats, _ = looks.look()
        members = {key: value for key, value in (health | stats).items() if key not in {"id", "done"}}
        click.echo(json.dumps(members))
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval)


def _lines(looks: Looks, width: int, height: int) -> list[str]:
    from edgeqwen.cli.top_view import screen

    health, stats, facts = looks.look()
    return screen(health, stats, facts, width=width, height=height)


def _show(looks: Looks, interval: float) -> None:
    """On the whole terminal, until `q`. A daemon that is not there may come back."""
    from edgeqwen.cli.top_view import no_answer
    from edgeqwen.errors import EdgeqwenError

    with _whole_terminal() as resized, contextlib.suppress(KeyboardInterrupt):
        while True:
            width, height = _size()
            try:
                lines = _lines(looks, width, height)
            except EdgeqwenError as error:
                lines = no_answer(error.message, width=width, height=height)
            sys.stdout.write(HOME + "".join(f"{line}{TO_END_OF_LINE}\r\n" for line in lines) + TO_END)
            sys.stdout.flush()
            if _is_ended(interval, resized):
                return


def _size() -> tuple[int, int]:
    """Columns, and lines but the last, where the cursor stays. Terminals that do not know their size say 0."""
    width, height = os.get_terminal_size(sys.stdout.fileno())
    return width or 80, max(1, (height or 24) - 1)


def _is_ended(within_s: float, resized: int) -> bool:
    """Whether `q` is pressed meanwhile. Returns early when the terminal has another size."""
    stdin = sys.stdin.fileno()
    ready, _, _ = select.select([stdin, resized], [], [], within_s)
    if resized in ready:
        os.read(resized, 4096)
    return stdin in ready and os.read(stdin, 64)[:1] in {b"q", b"Q", b"\x03", b"\x04", b""}


@contextlib.contextmanager
def _whole_terminal() -> Iterator[int]:
    """Another screen, and keys as they are pressed; all is as before in the end, also when a signal ends it. What comes
    is a descriptor that can be read once the terminal has another size. It cannot be suspended: the shell would get the
    terminal as it is here.
    """
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    resized, write_to = os.pipe()
    os.set_blocking(write_to, False)

    def resize(number: int, _: Any) -> None:
        with contextlib.suppress(BlockingIOError):  # there is enough to be read
            os.write(write_to, b".")

    wanted: dict[int, Any] = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGWINCH: resize,
        signal.SIGTSTP: signal.SIG_IGN,
    }
    signals: dict[int, Any] = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        sys.stdout.write(ENTER)
        tty.setcbreak(fd)
        yield resized
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        for number, handler in signals.items():
            signal.signal(number, handler)
        os.close(resized)
        os.close(write_to)
