"""Fixtures and hooks of all tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

ON_UVLOOP = {"test_server", "test_http", "test_client"}
"""Tests of sockets run on the loop that the daemon runs on: loops differ in what they tell of a dying connection."""


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
