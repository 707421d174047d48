"""docs/openapi.yaml and the HTTP front say the same: routes, operations, and what comes back for whatever is sent."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]  # of huggingface_hub's, which needs it
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeqwen.http.front import HttpFront
from edgeqwen.protocol.messages import OPERATIONS
from tests.daemons import HANG_GUARD_S, DaemonProcess, running_daemon, script_of
from tests.wire import Wire

PATH: Final = Path(__file__).parent.parent / "docs" / "openapi.yaml"
NUM_EXAMPLES: Final = 25
CALL: Final = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


@functools.cache
def document() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    return read


def listed() -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, methods in document()["paths"].items() for method in methods]


async def test_every_route_is_in_the_file_and_the_other_way_round(wire: Wire) -> None:
    front = HttpFront(wire.inference, wire.server.operations, wire.server.limits, sessions=wire.server.sessions)
    assert sorted((route.method, route.path) for route in front.routes) == sorted(listed())


def test_every_operation_is_in_the_file_and_the_other_way_round() -> None:
    own_paths = {path.removeprefix("/eqp/") for _, path in listed() if path.startswith("/eqp/")}
    named = set(document()["components"]["schemas"]["Operation"]["enum"]) | (own_paths - {"{op}"})
    assert named == set(OPERATIONS)


def test_every_reference_leads_somewhere() -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                found: Any = document()
                for name in reference.removeprefix("#/").split("/"):
                    found = found[name]
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                check(each)

    check(document())


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """Answers are short, whatever is asked for; over the network nobody can stop it."""
    script = script_of("Hello!", "<think>hm</think>four", CALL, capacity=512)
    with running_daemon(script, "--http", "127.0.0.1:0") as running:
        yield running


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("method", "path"), listed(), ids=lambda part: part)
def test_what_comes_back_is_what_the_file_says(daemon: DaemonProcess, method: str, path: str, mode: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    checks = [
        getattr(schemathesis.checks, name)
        for name in (
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_headers_conformance",
            "response_schema_conformance",
        )
    ]
    operation = schemathesis.openapi.from_dict(document())[path][method]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    if mode == "negative" and not operation.body:
        pytest.skip("nothing of this request can be wrong")
    url = f"http://127.0.0.1:{daemon.http_port}"

    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def play(data: st.DataObject) -> None:
        case = data.draw(strategy)
        response = case.call(base_url=url, timeout=HANG_GUARD_S)
        case.validate_response(response, checks=checks)

    play()
    assert daemon.process.poll() is None
