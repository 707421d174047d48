"""The form that a client wants an answer to have, read and checked, before anything is compiled.

An answer of the form is one of

    the client's own format       a value of a JSON schema, a text of a regular expression or of a grammar
    calls of tools                in the form that `text.tool_calls` finds and the model was taught:

        <tool_call>
        {"name": "get_weather", "arguments": {"city": "Kyiv"}}
        </tool_call>

or, with both tools and a format and the choice left to the model, either. A marker is the model's own token for it, if
it has one, else its text. The whole is a grammar for llguidance: one rule file that refers to the schemas by name.

JSON is written as models write it: on one line with or without a space, or on several with indentation. White space
without bound would be a way for a small model never to come to an end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from edgeqwen.constrain.exactness import exact
from edgeqwen.constrain.limits import check_grammar, check_regex, check_schema
from edgeqwen.errors import BadRequest
from edgeqwen.text.tokenizer import Tokenizer
from edgeqwen.text.tool_calls import CALL_CLOSE, CALL_OPEN

FORMAT: Final = "response_format"
CHOICE: Final = "tool_choice"
MAX_NAME_LEN: Final = 128

_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_KINDS: Final = ("text", "json_object", "json_schema", "regex", "grammar")
_MEMBERS: Final = {"json_schema": "json_schema", "regex": "regex", "grammar": "grammar"}
_SCHEMA_MEMBERS: Final = frozenset({"name", "description", "schema", "strict"})

JSON_STYLE: Final[Mapping[str, Any]] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"\n {0,32}| ",
    "coerce_one_of": False,
    "lenient": False,
}
"""How JSON is written; a keyword that cannot be followed is an error. Laid over what a schema says of this itself."""


@dataclass(frozen=True, slots=True)
class Rules:
    """A grammar in llguidance's dialect of Lark. `field` is the member of the request that it comes from."""

    field: str
    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """A regular expression that the whole answer matches."""

    field: str
    text: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema."""

    field: str
    schema: Mapping[str, Any]


Part: TypeAlias = Rules | Regex | Schema


@dataclass(frozen=True, slots=True)
class Function:
    """A tool that may be called, and what its arguments must be."""

    name: str
    arguments: Schema


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must be: of `format`, or calls of `functions`, or either if there are both. `is_single`: one call
    at most.
    """

    format: Part | None = None
    functions: tuple[Function, ...] = ()
    is_single: bool = False

    @property
    def field(self) -> str:
        """The member of the request to name when the form as a whole is at fault."""
        return CHOICE if self.format is None else self.format.field


def read_form(
    *,
    response_format: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None,
) -> Form | None:
    """The form that these members, in OpenAI's shape, ask for; None if any answer will do. Raises `BadRequest`, also
    for a tool that is none though no answer has to call it: the model would be told of it.
    """
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    wanted = None if response_format is None else _read_format(response_format)
    name = _read_choice(tool_choice, tools)
    if name is None and wanted is None:
        return None
    is_single = parallel_tool_calls is False
    if name is not None:
        functions = _read_functions(tools, name)
        return Form(functions=functions, is_single=is_single or name != "")
    if tools and tool_choice != "none":
        return Form(wanted, _read_functions(tools, ""), is_single)
    return Form(wanted)


def _read_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The function that must be called, "" for any of them, None if none must."""
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, str):
        if choice != "required":
            raise BadRequest("tool_choice must be none, auto, required or a function", field=CHOICE)
        name = ""
    else:
        assert choice is not None
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, Mapping):
            raise BadRequest('tool_choice must be {"type":"function","function":{"name":...}}', field=CHOICE)
        named: Any = function.get("name")
        if not isinstance(named, str) or not named:
            raise BadRequest("tool_choice.function.name must be a name", field=f"{CHOICE}.function.name")
        name = named
    if not tools:
        raise BadRequest("tool_choice demands a call, and there are no tools", field=CHOICE)
    return name


def _read_functions(tools: Sequence[Mapping[str, Any]], wanted: str) -> tuple[Function, ...]:
    """Those that may be called: the one named `wanted`, or all."""
    functions = [_read_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    meant = tuple(each for each in functions if wanted in ("", each.name))
    if not meant:
        raise BadRequest("tool_choice names a function that is not in tools", field=f"{CHOICE}.function.name")
    return meant


def _check_tool(tool: Any, field: str) -> None:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"{field} must be an object", field=field)
    if tool.get("type", "function") != "function":
        raise BadRequest(f"{field}.type must be function", field=f"{field}.type")
    function = tool.get("function")
    field = f"{field}.function"
    if not isinstance(function, Mapping):
        raise BadRequest(f"{field} must be an object", field=field)
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LEN:
        raise BadRequest(f"{field}.name must be a name of 1 to {MAX_NAME_LEN} characters", field=f"{field}.name")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise BadRequest(f"{field}.parameters must be a JSON schema, an object", field=f"{field}.parameters")


def _read_function(tool: Mapping[str, Any], field: str) -> Function:
    function = tool["function"]
    field = f"{field}.function.parameters"
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"additionalProperties": False}
    check_schema(parameters, field)
    return Function(function["name"], Schema(field, {"type": "object", **parameters}))


def _read_format(given: Mapping[str, Any]) -> Part | None:
    kind = given.get("type")
    if kind not in _KINDS:
        raise BadRequest(f"{FORMAT}.type must be one of {', '.join(_KINDS)}", field=f"{FORMAT}.type")
    member = _MEMBERS.get(kind, "type")
    if unknown := given.keys() - {"type", member}:
        raise _unknown(FORMAT, min(unknown), f"of type {kind}")
    field = f"{FORMAT}.{member}"
    value = given.get(member)
    match kind:
        case "text":
            return None
        case "json_object":
            return Schema(FORMAT, _ANY_OBJECT)
        case "json_schema":
            return _read_schema(value, field)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{field} must be a text", field=field)
    if kind == "regex":
        check_regex(value, field)
        return Regex(field, value)
    check_grammar(value, field)
    return Rules(field, value)


def _read_schema(value: Any, field: str) -> Schema:
    if not isinstance(value, Mapping):
        raise BadRequest(f"{field} must be an object", field=field)
    if unknown := value.keys() - _SCHEMA_MEMBERS:
        raise _unknown(field, min(unknown), "")
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        if value.get(name) is not None and not isinstance(value[name], kind):
            text = "a string" if kind is str else "true or false"
            raise BadRequest(f"{field}.{name} must be {text}", field=f"{field}.{name}")
    field = f"{field}.schema"
    if value.get("schema") is None:
        raise BadRequest(f"{field} is missing", field=field)
    check_schema(value["schema"], field)
    return Schema(field, value["schema"])


def _unknown(field: str, name: str, suffix: str) -> BadRequest:
    shown = f"{field}.{name}"[:64]
    return BadRequest(" ".join(filter(None, (f"unknown member {shown}", suffix))), field=shown)


def grammar_of(form: Form, tokenizer: Tokenizer) -> str:
    """The form as llguidance takes it: JSON text, whose first grammar is the whole. One form gives one text."""
    if form.format is not None and not form.functions:
        return grammar_of_part(form.format)
    parts: dict[str, Part] = {f"f{index}": function.arguments for index, function in enumerate(form.functions)}
    parts |= {} if form.format is None else {"format": form.format}
    start = "start: calls" if form.format is None else "start: @format | calls"
    rules = "\n".join([start, *_call_rules(form, tokenizer)])
    named = [{"name": name, **_grammar(part)} for name, part in parts.items()]
    return _encode({"grammars": [{"lark_grammar": rules}, *named]})


def grammar_of_part(part: Part) -> str:
    """A part of a form alone."""
    return _encode({"grammars": [_grammar(part)]})


def _call_rules(form: Form, tokenizer: Tokenizer) -> list[str]:
    opening, closing = _marker(CALL_OPEN, tokenizer), _marker(CALL_CLOSE, tokenizer)
    bodies = []
    for index, function in enumerate(form.functions):
        before = '{"name": ' + _encode(function.name) + ', "arguments": '
        bodies.append(f'{_quoted(before)} @f{index} "}}"')
    return [
        "calls: call" if form.is_single else 'calls: call ("\\n" call)*',
        f'call: {opening} "\\n" body "\\n" {closing}',
        f"body: {' | '.join(bodies)}",
    ]


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """The token of a marker if it has one that leaves its text in the answer, where calls are looked for."""
    token_id = tokenizer.added_token_id(text)
    has_text = token_id is not None and tokenizer.token_bytes(token_id) != b""
    return f"<[{token_id}]>" if has_text else _quoted(text)


def _grammar(part: Part) -> dict[str, Any]:
    match part:
        case Schema():
            return {"json_schema": {**exact(part.schema), "x-guidance": JSON_STYLE}}
        case Regex():
            return {"lark_grammar": f"start: /{_IN_SLASHES.sub(_between_slashes, part.text)}/"}
        case Rules():
            return {"lark_grammar": part.text}


_IN_SLASHES: Final = re.compile(r"\\.|/|\n", re.DOTALL)


def _between_slashes(match: re.Match[str]) -> str:
    """Lark ends a regular expression at the first slash that has no backslash before it, and at the end of the line."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])


def _quoted(text: str) -> str:
    """As Lark quotes a text, which is JSON's way, only that it reads no DEL."""
    return _encode(text).replace("\x7f", "\\u007f")


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
