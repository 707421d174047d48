"""Fixtures and hooks of all tests."""

from __future__ import annotations

import asyncio
import ctypes
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.wire import Gate, Wire, serve

# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("unhurried", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

ON_UVLOOP = {
    "test_server",
    "test_http",
    "test_http_formats",
    "test_network",
    "test_client",
    "test_wire_limits",
    "test_reload",
}
"""Tests of sockets run on the loop that the daemon runs on: loops differ in what they tell of a dying connection."""


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True, scope="session")
def _signals_reach_what_is_started() -> None:
    """A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP; programs started from there do
    so, too, for that is inherited, as no handler is.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


FENV_BYTES = 64
"""Room for an `fenv_t` (fenv.h): 28 or 32 bytes on x86, 8 on 64-bit ARM."""


def _fenv() -> ctypes.Array[ctypes.c_char]:
    state = ctypes.create_string_buffer(FENV_BYTES)
    assert ctypes.CDLL(None).fegetenv(state) == 0
    return state


FRESH = _fenv()


@pytest.fixture(autouse=True)
def _fresh_floating_point_mode() -> Iterator[None]:
    """Gives each test denormal numbers, whatever ran before it.

    A session with `set_denormal_as_zero` leaves that mode behind in the thread that ran it. In the daemon that is the
    engine thread; here it is the tests' own, and tests that draw floats need the mode that IEEE 754 asks for.
    """
    ctypes.CDLL(None).fesetenv(FRESH)
    yield
    ctypes.CDLL(None).fesetenv(FRESH)


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    """A server with a scripted engine, for tests that need nothing special of either."""
    async with serve(tmp_path) as running:
        yield running


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Closed at first; opened at the end, so that no engine thread stays behind."""
    gate = Gate()
    yield gate
    gate.opened.set()
