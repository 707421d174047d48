"""What is imported of the library that speaks HTTP: its server, and all of it for whoever asks for more."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

UNUSED = ("client", "connector", "cookiejar", "formdata", "resolver", "web", "web_app", "web_urldispatcher")


def printed_by(script: str) -> Any:
    """What a fresh interpreter prints as JSON."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(result.stdout)


def test_serving_http_loads_no_client_and_no_application_framework() -> None:
    loaded = printed_by("import edgeqwen.http.front, json, sys; print(json.dumps(list(sys.modules)))")
    assert "aiohttp.web_protocol" in loaded
    assert not {f"aiohttp.{name}" for name in UNUSED} & set(loaded)


@pytest.mark.parametrize("first", ["edgeqwen.http.web", "aiohttp"])
def test_who_imports_the_library_too_gets_all_of_it_and_the_same_classes(first: str) -> None:
    found = printed_by(
        f"import {first}\n"
        "from edgeqwen.http import web\n"
        "import aiohttp, aiohttp.web, importlib.metadata, json\n"
        "print(json.dumps([\n"
        "    aiohttp.web.Response is web.Response,\n"
        "    aiohttp.web_protocol.RequestHandler is web.RequestHandler,\n"
        "    aiohttp.StreamReader is web.StreamReader,\n"
        "    issubclass(aiohttp.ClientPayloadError, aiohttp.ClientError),\n"
        "    aiohttp.ClientSession.__module__,\n"
        "    aiohttp.__version__ == importlib.metadata.version('aiohttp'),\n"
        "    type(aiohttp).__name__,\n"
        "]))"
    )
    assert found == [True, True, True, True, "aiohttp.client", True, "module"]


def test_a_name_that_the_library_does_not_have_is_an_error_as_usual() -> None:
    found = printed_by(
        "from edgeqwen.http import web\n"
        "import aiohttp, json\n"
        "print(json.dumps([hasattr(aiohttp, name) for name in ('no_such_thing', 'ClientSession')]))"
    )
    assert found == [False, True]
