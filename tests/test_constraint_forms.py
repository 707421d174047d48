"""What a client asks an answer to look like: read, checked, compiled, and followed token by token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeqwen.constrain import compiler as compiling
from edgeqwen.constrain.compiler import Compiler
from edgeqwen.constrain.exactness import PATTERNS, exact
from edgeqwen.constrain.form import Form, grammar_of, read_form
from edgeqwen.constrain.limits import MAX_BYTES, MAX_NESTING
from edgeqwen.core.constraint import Constraint
from edgeqwen.errors import BadRequest, EdgeqwenError, RuntimeFailed
from edgeqwen.text import Tokenizer
from edgeqwen.text.tool_calls import Call, CallFinder
from tests.random_schemas import SchemaMaker
from tests.tiny_tokenizers import byte_level, byte_level_file, sentencepiece

SECRET = "sEcReT"


def tool(name: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {"type": "object", "properties": {"city": {"enum": ["Kyiv", "Oslo"]}}, "required": ["city"]}
TOOLS = (tool("weather", {**CITY, "additionalProperties": False}), tool('say "hi"'))


NOTHING: dict[str, Any] = {"response_format": None, "tools": (), "tool_choice": None, "parallel_tool_calls": None}


def form(**members: Any) -> Form | None:
    return read_form(**NOTHING | members)


def json_schema(**members: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": members}


def schema_format(schema: Any) -> dict[str, Any]:
    return json_schema(name="answer", schema=schema)


def compile_form(wanted: Form | None, tokenizer: Tokenizer | None = None, eos: tuple[int, ...] = ()) -> Constraint:
    async def run() -> Constraint:
        assert wanted is not None
        return await Compiler(tokenizer or byte_level(), eos).compile(wanted)

    return asyncio.run(run())


def accepts(constraint: Constraint, text: str, tokenizer: Tokenizer | None = None, *, markers: bool = True) -> bool:
    """Whether the text may be written, with the model's markers as tokens, and nothing need follow."""
    tokenizer = tokenizer or byte_level()
    state = constraint.begin()
    for token in tokenizer.encode(text, special=markers):
        row = np.zeros(tokenizer.num_tokens, np.float32)
        state.mask(row)
        if row[token] != 0:
            return False
        state.take(token)
    state.prepare()
    return state.is_over


def written(constraint: Constraint, seed: int, tokenizer: Tokenizer, *, most: int) -> str | None:
    """A text by lot; None if it has no end after so many tokens."""
    rng = np.random.default_rng(seed)
    state = constraint.begin()
    tokens: list[int] = []
    while not state.is_over:
        row = np.zeros(tokenizer.num_tokens, np.float32)
        state.mask(row)
        allowed = np.flatnonzero(row == 0)
        if len(tokens) == most:
            return None
        tokens.append(int(rng.choice(allowed)))
        state.take(tokens[-1])
    return tokenizer.decode_bytes(tokens).decode()


# Reading.


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "none"},
    ],
)
def test_any_answer_will_do_where_nothing_else_is_said(members: dict[str, Any]) -> None:
    assert form(**members) is None


SCHEMA = "response_format.json_schema.schema"
LONG = "x" * MAX_BYTES
HIDDEN = 'start: %json {"\\u006dultipleOf":1234577}'


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(name="a")}, SCHEMA),
        ({"response_format": json_schema(schemas={})}, "response_format.json_schema.schemas"),
        ({"response_format": json_schema(schema={}, name=1)}, "response_format.json_schema.name"),
        ({"response_format": json_schema(schema={}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": schema_format([])}, SCHEMA),
        ({"response_format": schema_format({"enum": [LONG]})}, SCHEMA),
        ({"response_format": schema_format({"multipleOf": 1234577})}, SCHEMA),
        ({"response_format": schema_format({"allOf": [{"multipleOf": n} for n in (101, 103, 107)]})}, SCHEMA),
        ({"response_format": schema_format({"multipleOf": 1e-300})}, SCHEMA),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": {"type": "regex", "regex": ""}}, "response_format.regex"),
        ({"response_format": {"type": "regex", "regex": "a" * (MAX_BYTES + 1)}}, "response_format.regex"),
        ({"response_format": {"type": "grammar", "grammar": 1}}, "response_format.grammar"),
        ({"response_format": {"type": "grammar", "grammar": HIDDEN}}, "response_format.grammar"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "weather"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required", "tools": [TOOLS[0], tool("")]}, "tools[1].function.name"),
        ({"tool_choice": "required", "tools": [tool("f", {"const": LONG})]}, "tools[0].function.parameters"),
        ({"tools": [TOOLS[0], {}]}, "tools[1].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("")], "tool_choice": "none"}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_error_names_the_member(members: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        form(**members)
    assert caught.value.field == field
    assert "must" in caught.value.message or field in caught.value.message or "tool_choice" in caught.value.message


def test_nesting_is_bounded_before_anything_recursive_reads_it() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_NESTING + 1):
        schema = {"items": schema}
    with pytest.raises(BadRequest) as caught:
        form(response_format=schema_format(schema))
    assert caught.value.field == SCHEMA


@pytest.mark.parametrize("numbers", [(0.01,), (5, 10, 100), (0.25, 0.5), (7.5,), (1,)])
def test_ordinary_multiples_are_within_the_limits(numbers: tuple[float, ...]) -> None:
    assert form(response_format=schema_format({"anyOf": [{"multipleOf": each} for each in numbers]})) is not None


# Compiling.


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"const": SECRET}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"const": SECRET}}, "propertyNames"),
        ({"type": "string", "format": SECRET}, "format"),
        ({"type": SECRET}, "type"),
        ({"$ref": f"#/$defs/{SECRET}"}, "$ref"),
        ({"$ref": f"https://{SECRET}.example/"}, "$ref"),
        ({"type": "string", "pattern": f"(?={SECRET})"}, "look-around"),
        ({"type": "object", "properties": {}, "required": [SECRET], "additionalProperties": False}, "satisfied"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "satisfied"),
        ({"oneOf": [{"type": "string"}, {"const": SECRET}]}, "oneOf"),
        ({"$ref": "#"}, "satisfied"),
        ({"type": "object", "properties": {f"{SECRET}{i}": {"type": "string"} for i in range(1500)}}, "complex"),
    ],
)
def test_what_cannot_be_followed_is_said_and_nothing_of_the_clients_repeated(schema: Any, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compile_form(form(response_format=schema_format(schema)))
    assert caught.value.field == SCHEMA
    assert said in caught.value.message
    assert SECRET not in caught.value.message
    with pytest.raises(BadRequest) as caught:
        compile_form(form(tools=[TOOLS[1], tool("f", schema)], tool_choice="required"))
    assert caught.value.field in ("tools[1].function.parameters", "tool_choice")  # a whole may be too much
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (f"start: {SECRET}", "line 1, column 8"),
        ("first: /a/", "start"),
        ("start: a\na: (", "line 2"),
        (f"start: <{SECRET}>", "special token"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested"),
        ("start: /(a/", "regular expression"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said_with_its_place(grammar: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        compile_form(form(response_format={"type": "grammar", "grammar": grammar}))
    assert caught.value.field == "response_format.grammar"
    assert said in caught.value.message
    assert SECRET not in caught.value.message


def test_rules_in_a_chain_of_thousands_do_not_end_the_process() -> None:
    rules = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4500)) + '\na4500: "x"'
    constraint = compile_form(form(response_format={"type": "grammar", "grammar": rules}))
    assert accepts(constraint, "x")


def test_a_schema_cannot_change_how_json_is_written() -> None:
    schema = {"const": [1], "x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}}
    constraint = compile_form(form(response_format=schema_format(schema)))
    assert accepts(constraint, "[1]")
    assert accepts(constraint, "[ 1 ]")
    assert not accepts(constraint, "[   1]")


def test_a_form_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = compiling._compile

    def counted(wanted: Form, grammar: str, vocabulary: Any) -> Constraint:
        compiled.append(grammar)
        return real(wanted, grammar, vocabulary)

    monkeypatch.setattr(compiling, "_compile", counted)

    async def run() -> None:
        compiler = Compiler(byte_level(), ())
        forms = [form(response_format={"type": "regex", "regex": text}) for text in ("a", "b", "a", "a")]
        await asyncio.gather(*(compiler.compile(each) for each in forms if each is not None))

    asyncio.run(run())
    assert len(compiled) == 2


def test_what_was_compiled_before_waits_for_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    real = compiling._compile

    def slow(wanted: Form, *given: Any) -> Constraint:
        if getattr(wanted.format, "text", "") == "slow":
            release.wait(30)
        return real(wanted, *given)

    monkeypatch.setattr(compiling, "_compile", slow)
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 30.0)
    slow_form, known_form = (form(response_format={"type": "regex", "regex": text}) for text in ("slow", "known"))
    assert slow_form is not None
    assert known_form is not None

    async def run() -> None:
        compiler = Compiler(byte_level(), ())
        known = await compiler.compile(known_form)
        waiting = asyncio.create_task(compiler.compile(slow_form))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            assert await compiler.compile(known_form) is known
        assert not waiting.done()
        release.set()
        await waiting

    asyncio.run(run())


def test_what_takes_too_long_is_refused_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    real = compiling._compile

    def slow(wanted: Form, *given: Any) -> Constraint:
        if wanted.format is not None and getattr(wanted.format, "text", "").startswith("slow"):
            release.wait(30)
        return real(wanted, *given)

    monkeypatch.setattr(compiling, "_compile", slow)
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 0.05)

    async def run() -> list[str]:
        compiler = Compiler(byte_level(), ())
        codes = []
        for text in ("slow1", "quick1", "slow2", "quick2"):
            wanted = form(response_format={"type": "regex", "regex": text})
            assert wanted is not None
            monkeypatch.setattr(compiling, "MAX_COMPILE_S", 0.05 if text.startswith("slow") else 30.0)
            try:
                await compiler.compile(wanted)
                codes.append("done")
            except EdgeqwenError as error:
                codes.append(f"{error.code} {error.field}")
        release.set()
        for thread in compiler._stuck:
            thread.join(30)
        monkeypatch.setattr(compiling, "MAX_COMPILE_S", 30.0)
        wanted = form(response_format={"type": "regex", "regex": "slow3"})
        assert wanted is not None
        await compiler.compile(wanted)
        return codes

    assert asyncio.run(run()) == [
        "bad_request response_format.regex",
        "done",
        "bad_request response_format.regex",
        "busy response_format.regex",
    ]


# Following.


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"type": "json_object"}, ['{"a":{"b":[1,null]}}', "{}", '{\n  "a": "ö"\n}'], ["[]", "1", "{} ", "{\n\n}"]),
        ({"type": "regex", "regex": r"\d{2}/[a-c]"}, ["12/a"], ["1/a", "12/d", "12/ab"]),
        ({"type": "grammar", "grammar": 'start: "a" b+\nb: "x" | "y"\nstop: "z"'}, [], ["a", "b"]),
        ({"type": "grammar", "grammar": 'start: "a" b "."\nb: "x" | "y" b'}, ["ax.", "ayyx."], ["ay.", "a."]),
        (schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, "é"]}}}), ["1", '"é"'], ["2", "é"]),
    ],
)  # fmt: skip
def test_an_answer_keeps_to_its_format(wanted: Any, good: list[str], bad: list[str], tokenizer: Tokenizer) -> None:
    constraint = compile_form(form(response_format=wanted), tokenizer)
    for text in good:
        assert accepts_text(constraint, text, tokenizer), text
    for text in bad:
        assert not accepts_text(constraint, text, tokenizer), text


def accepts_text(constraint: Constraint, text: str, tokenizer: Tokenizer) -> bool:
    """With whatever tokens it takes, since an encoder may put a space before a text."""
    state = constraint.begin()
    rest = text.encode()
    while rest:
        row = np.zeros(tokenizer.num_tokens, np.float32)
        state.mask(row)
        allowed = [(tokenizer.token_bytes(int(token)), int(token)) for token in np.flatnonzero(row == 0)]
        fitting = [(data, token) for data, token in allowed if data and rest.startswith(data)]
        if not fitting:
            return False
        data, token = max(fitting, key=lambda each: len(each[0]))
        state.take(token)
        rest = rest[len(data) :]
    return state.is_over


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city":"Kyiv"}}\n</tool_call>'
SAY = '<tool_call>\n{"name": "say \\"hi\\"", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("has_markers", [True, False])
def test_a_demanded_call_is_of_a_tool_that_there_is(has_markers: bool) -> None:
    tokenizer = byte_level()  # has <tool_call> as a token of its own, and no </tool_call>
    if not has_markers:
        tokenizer = Tokenizer.from_bytes(byte_level_file(added=[]))
    assert (tokenizer.added_token_id("<tool_call>") is not None) == has_markers
    required = compile_form(form(tools=TOOLS, tool_choice="required", parallel_tool_calls=False), tokenizer)
    assert accepts(required, WEATHER, tokenizer)
    assert accepts(required, SAY, tokenizer)
    assert not accepts(required, WEATHER.replace("Kyiv", "Rome"), tokenizer)
    assert not accepts(required, "Hello", tokenizer)
    assert not accepts(required, f"{WEATHER}\n{SAY}", tokenizer)
    named = compile_form(
        form(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}), tokenizer
    )
    assert accepts(named, WEATHER, tokenizer)
    assert not accepts(named, SAY, tokenizer)


def test_several_calls_may_be_demanded_at_once() -> None:
    constraint = compile_form(form(tools=TOOLS, tool_choice="required"), eos=(3,))
    state = constraint.begin()
    for token in byte_level().encode(f"{WEATHER}\n{SAY}", special=True):
        state.take(token)
    row = np.zeros(byte_level().num_tokens, np.float32)
    state.mask(row)
    assert not state.is_over
    assert row[3] == 0, "it may end"


def test_with_tools_and_a_format_the_answer_is_either() -> None:
    constraint = compile_form(form(tools=TOOLS, response_format={"type": "json_object"}, parallel_tool_calls=False))
    assert accepts(constraint, "{}")
    assert accepts(constraint, WEATHER)
    assert not accepts(constraint, f"{{}}{WEATHER}")


@settings(max_examples=60, deadline=None)
@given(name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), seed=st.integers(0, 1 << 30))
def test_a_call_that_was_demanded_is_found(name: str, seed: int) -> None:
    tokenizer = byte_level()
    tools = [tool(name, {**CITY, "additionalProperties": False})]
    wanted = form(tools=tools, tool_choice="required", parallel_tool_calls=False)
    text = written(compile_form(wanted, tokenizer), seed, tokenizer, most=2000)
    assert text is not None
    finder = CallFinder()
    (found,) = finder.push(text) + finder.finish()
    assert isinstance(found, Call)
    assert found.name == name
    assert json.loads(found.arguments)["city"] in ("Kyiv", "Oslo")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_what_is_written_by_lot_is_a_value_of_the_schema(seed: int) -> None:
    schema = SchemaMaker(seed).make()
    text = written(compile_form(form(response_format=schema_format(schema))), seed, byte_level(), most=3000)
    if text is not None:
        jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string", "format": name} for name in (*PATTERNS, "duration", "ipv4", "ipv6", "uuid", "uri")),
        {"type": "string", "format": "date", "pattern": "^2024-02"},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.25},
        {"type": ["number", "null"], "exclusiveMinimum": 3, "minimum": 2, "maximum": 3.5},
        {"exclusiveMinimum": 5, "type": "integer", "maximum": 7},
    ],
    ids=str,
)
def test_values_by_lot_are_within_formats_and_bounds(schema: dict[str, Any]) -> None:
    items = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    constraint = compile_form(form(response_format=schema_format(items)))
    validator = jsonschema_rs.Draft202012Validator(items, validate_formats=True)
    texts = [text for seed in range(60) if (text := written(constraint, seed, byte_level(), most=300)) is not None]
    assert len(texts) > 30
    assert [text for text in texts if not validator.is_valid(json.loads(text))] == []


def test_what_only_looks_like_a_keyword_stays_as_it_is() -> None:
    schema = {
        "properties": {"format": {"const": {"format": "date"}}, "enum": {"format": "date"}},
        "enum": [{"exclusiveMinimum": 1}],
        "items": [{"format": "color"}, {"exclusiveMinimum": True}, {"exclusiveMaximum": 1e9}],
    }
    found = exact(schema)
    assert found["properties"] == {"format": {"const": {"format": "date"}}, "enum": {"pattern": PATTERNS["date"]}}
    assert {**found, "properties": schema["properties"]} == schema


def test_a_marker_is_no_text_of_a_string() -> None:
    constraint = compile_form(form(response_format={"type": "json_object"}))
    assert not accepts(constraint, '{"a<think>": 1}')
    assert accepts(constraint, '{"a<think>": 1}', markers=False)


def test_choices_go_their_own_ways() -> None:
    constraint = compile_form(form(response_format={"type": "regex", "regex": "(ab|cd)"}))
    first, second = constraint.begin(), constraint.begin()
    (a, b), (c, d) = byte_level().encode("ab", special=False), byte_level().encode("cd", special=False)
    first.take(a)
    second.take(c)
    first.take(b)
    second.take(d)
    assert first.is_over
    assert second.is_over


def test_a_token_that_cannot_follow_is_an_error_that_names_the_member() -> None:
    state = compile_form(form(response_format={"type": "regex", "regex": "a"})).begin()
    (wrong,) = byte_level().encode("b", special=False)
    with pytest.raises(RuntimeFailed) as caught:
        state.take(wrong)
    assert caught.value.field == "response_format.regex"
    with pytest.raises(RuntimeFailed):
        state.mask(np.zeros(byte_level().num_tokens, np.float32))


def test_one_form_is_one_grammar_and_another_is_another() -> None:
    forms = [form(tools=TOOLS, tool_choice=choice) for choice in ("required", "required")]
    texts = {grammar_of(each, byte_level()) for each in forms if each is not None}
    assert len(texts) == 1
    single = form(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert single is not None
    assert grammar_of(single, byte_level()) not in texts
