"""Daemons for the clients that people have: on a port with a key and on their socket, each saying one thing."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.daemons import DaemonProcess, running_daemon, script_of
from tests.models import smollm2_package

KEY: Final = "the-key-of-the-tests"


@dataclass(frozen=True, slots=True)
class Served:
    """`url` is without a path; over the network it takes the `key`."""

    daemon: DaemonProcess
    key: str = KEY

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.daemon.http_port}"


class Servers:
    """Daemons of a module of tests, started when they are first wanted, stopped together."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eq-keys-")))
        (self._folder / "keys").write_text(KEY)
        (self._folder / "keys").chmod(0o600)

    @functools.cached_property
    def plain(self) -> Served:
        return self._start(script_of("Hello!"))

    @functools.cached_property
    def thinking(self) -> Served:
        return self._start(script_of("<think>\nhm\n</think>\n\nfour"))

    @functools.cached_property
    def calling(self) -> Served:
        call = '<tool_call>\n{"name": "look", "arguments": {"city": "Kyiv"}}\n</tool_call>'
        return self._start(script_of(call, capacity=4096))

    @functools.cached_property
    def endless(self) -> Served:
        return self._start('fake:{"step_s":0.02,"capacity":100000}')

    @functools.cached_property
    def real(self) -> Served:
        """SmolLM2, which answers to anything and thinks of nothing."""
        return self._start("onnx", "--threads", "2", "--context", "2048", model=smollm2_package("int8"))

    def _start(self, runtime: str, *flags: str, model: Path | None = None) -> Served:
        environ = {"EDGEQWEN_HTTP_API_KEY_FILE": str(self._folder / "keys")}
        daemon = running_daemon(runtime, "--http", "127.0.0.1:0", *flags, model=model, environ=environ)
        return Served(self._stack.enter_context(daemon))


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(stack)
