"""The real SmolLM2-135M-Instruct held to random schemas and to calls of tools, at temperature 1, over the socket."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models import smollm2_package
from tests.soak import schemas
from tests.soak.service import Service, package_model

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def test_every_finished_answer_is_a_value_of_its_schema(tmp_path: Path) -> None:
    model = package_model(smollm2_package("int8"), "fp32")
    found = schemas.run(tmp_path, model, schemas.Size(num_schemas=20, max_tokens=200, seed=50))
    assert found["stop"] >= 10


def test_a_demanded_call_comes_whole(tmp_path: Path) -> None:
    model = package_model(smollm2_package("int8"), "fp32")
    with Service(tmp_path / "calls", model) as service, service.line() as line:
        for seed in range(5):
            given = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
            final = line.must("chat", prompt="How is the weather in Kyiv?", temperature=1.0, seed=seed, **given)
            assert final["finish"] == "tool_calls"
            (call,) = final["tool_calls"]
            assert call["name"] == "get_weather"
            arguments = json.loads(call["arguments"])
            assert arguments.keys() == {"city", "unit"}
            assert arguments["unit"] in ("C", "F")
