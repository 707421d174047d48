"""Notifying a service manager: a stand-in for it listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeqwen.service import Notifier


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        yield sock


def test_states_arrive_in_order(manager: socket.socket, tmp_path: Path) -> None:
    manager.bind(str(tmp_path / "notify"))
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    notifier.status("loading")
    notifier.ready("serving")
    notifier.stopping()
    assert [manager.recv(200) for _ in range(3)] == [b"STATUS=loading", b"READY=1\nSTATUS=serving", b"STOPPING=1"]


def test_a_reload_is_told_from_its_begin_to_its_end_whatever_comes_of_it(
    manager: socket.socket, tmp_path: Path
) -> None:
    manager.bind(str(tmp_path / "notify"))
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    with notifier.reloading(5):
        pass  # not ready yet, and nobody is to believe so
    notifier.ready("serving")
    with notifier.reloading(7):
        assert manager.recv(200) == b"READY=1\nSTATUS=serving"
        assert manager.recv(200) == b"RELOADING=1\nMONOTONIC_USEC=7"
    assert manager.recv(200) == b"READY=1\nSTATUS=serving"
    with pytest.raises(ValueError, match="wrong"), notifier.reloading(8):
        raise ValueError("wrong")
    notifier.stopping()
    expected = [b"RELOADING=1\nMONOTONIC_USEC=8", b"READY=1\nSTATUS=serving", b"STOPPING=1"]
    assert [manager.recv(200) for _ in range(3)] == expected


def test_abstract_address(manager: socket.socket, tmp_path: Path) -> None:
    name = f"edgeqwen-{tmp_path.name}-{id(manager)}"
    manager.bind(f"\0{name}")
    Notifier({"NOTIFY_SOCKET": f"@{name}"}).stopping()
    assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_no_manager_is_no_error(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)
    notifier.ready("serving")
    notifier.stopping()
