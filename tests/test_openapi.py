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
CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
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
    script = script_of("Hello!", "<think>hm</think>four", CALL, capacity=768)
    with running_daemon(script, "--http", "127.0.0.1:0") as running:
        yield running


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("method", "path"), listed(), ids=lambda part: part)
def test_what_comes_back_is_what_the_file_says(daemon: DaemonProcess, method: str, path: str, mode: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    checks = [getattr(schemathesis.checks, name) for name in CHECKS]
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


QUESTION: Final = [{"role": "user", "content": "hi"}]
LOOK: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THEIR_LOOK: Final = {"name": "look", "input_schema": {"type": "object"}}
WITH_USAGE: Final = {"include_usage": True}
STREAMED: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/v1/chat/completions", {"messages": QUESTION, "n": 3, "return_reasoning": True}),
    ("/v1/chat/completions", {"messages": QUESTION, "n": 3, "tools": [LOOK], "stream_options": WITH_USAGE}),
    ("/v1/chat/completions", {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "stream_options": WITH_USAGE}),
    ("/v1/completions", {"prompt": [5, 6], "logprobs": 2, "max_tokens": 3}),
    ("/v1/messages", {"messages": QUESTION, "max_tokens": 80, "thinking": {"type": "adaptive"}}),
    ("/v1/messages", {"messages": QUESTION, "max_tokens": 80, "tools": [THEIR_LOOK]}),
    ("/v1/messages", {"messages": QUESTION, "max_tokens": 2, "stop_sequences": ["e"]}),
]
NUM_SCRIPTS: Final = 3


@pytest.mark.parametrize(("path", "body"), STREAMED)
def test_events_of_a_stream_are_what_the_file_says(daemon: DaemonProcess, path: str, body: dict[str, Any]) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    operation = schemathesis.openapi.from_dict(document())[path]["POST"]
    case = operation.Case(body=body | {"stream": True}, media_type="application/json")
    checks = [schemathesis.checks.response_schema_conformance]

    def ask() -> Any:
        response = case.call(base_url=f"http://127.0.0.1:{daemon.http_port}", timeout=HANG_GUARD_S)
        assert (response.status_code, response.headers["content-type"]) == (200, ["text/event-stream"])
        return response

    for _ in range(NUM_SCRIPTS):
        case.validate_response(ask(), checks=checks)
    wrong = ask()
    wrong.content = wrong.content.replace(b'"index":0', b'"index":"0"')
    with pytest.raises(schemathesis.errors.FailureGroup):
        case.validate_response(wrong, checks=checks)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 80}),
    ],
)
def test_an_error_within_a_stream_is_what_the_file_says(path: str, body: dict[str, Any]) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    operation = schemathesis.openapi.from_dict(document())[path]["POST"]
    case = operation.Case(body=body | {"stream": True}, media_type="application/json")
    with running_daemon(script_of("word " * 40, fail_at_step=4), "--http", "127.0.0.1:0") as broken:
        response = case.call(base_url=f"http://127.0.0.1:{broken.http_port}", timeout=HANG_GUARD_S)
    assert b'data: {"error":' in response.content or b"event: error" in response.content
    case.validate_response(response, checks=[schemathesis.checks.response_schema_conformance])
