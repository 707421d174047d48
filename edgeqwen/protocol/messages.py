"""Messages of `eqp/1`: from a JSON object to a typed request.

Types are checked here, ranges where the engine resolves them, so that every front gives the same error for the same
value. A member that is unknown or of the wrong type is a `bad_request` that names it; names that start with `x_` are
dropped. `null` is "not given" everywhere but in the envelope. What an error says never repeats a value that was sent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from edgeqwen.errors import BadRequest, EdgeqwenError
from edgeqwen.protocol.batch_message import Batch
from edgeqwen.protocol.embed_message import Embed
from edgeqwen.protocol.message import Message
from edgeqwen.protocol.operation import LaterOperation, Operation
from edgeqwen.protocol.session_messages import SESSION_OPERATIONS

RequestId: TypeAlias = str | int

PROTOCOL_VERSION: Final = 1
MAX_ID: Final = (1 << 53) - 1
MAX_ID_LEN: Final = 64
ENVELOPE: Final = ("op", "id", "v", "close")


class Hello(Operation, frozen=True, kw_only=True):
    """Which versions, features and limits the server has."""


class Health(Operation, frozen=True, kw_only=True):
    """Whether the event loop answers, and how far the model is loaded."""


class Ready(Operation, frozen=True, kw_only=True):
    """Whether generations are served now."""


class Stats(Operation, frozen=True, kw_only=True):
    """Counters."""


class Metrics(Operation, frozen=True, kw_only=True):
    """What is measured, as Prometheus reads it."""


class Cancel(Operation, frozen=True, kw_only=True):
    """End a generation: by `target`, an id of this connection, or by `rid` from any connection of the same owner."""

    target: str | int | None = None
    rid: str | None = None


class Shutdown(Operation, frozen=True, kw_only=True):
    """Finish what runs within `drain_s` seconds, then stop."""

    drain_s: float | None = None


class Reload(Operation, frozen=True, kw_only=True):
    """Read the configuration again."""


class Tokenize(LaterOperation, frozen=True, kw_only=True):
    """Text to token ids; with `special` the texts of added tokens become their ids."""

    text: str
    special: bool = False


class Detokenize(LaterOperation, frozen=True, kw_only=True):
    """Token ids to text."""

    tokens: list[int]


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to generate: members that every front has under these names. Ranges are not checked here."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    ignore_eos: bool | None = None
    deadline_ms: int | None = None

    def to_input(self) -> dict[str, Any]:
        """These members as the engine's `GenerationInput` takes them."""
        members = {name: getattr(self, name) for name in GenerationOptions.__struct_fields__}
        if self.stop is not None:
            members["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return members


class Generation(Operation, GenerationOptions, frozen=True, kw_only=True):
    """Members that `chat` and `generate` have in common."""

    stream: bool = False
    verbose: bool = False
    prompt: str | None = None
    wait: bool | None = None
    cache: bool | None = None
    speculate: bool | None = None
    priority: str | None = None
    response_format: dict[str, Any] | None = None


class Chat(Generation, frozen=True, kw_only=True):
    """Answer a conversation; `prompt` is short for one user message. With `session` they are what is new in it."""

    session: str | None = None
    if_rev: int | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    think: bool | None = None
    think_budget: int | None = None

    def turns(self) -> tuple[Mapping[str, Any], ...]:
        if (self.messages is None) == (self.prompt is None):
            raise BadRequest("give either messages or prompt", field="messages")
        if self.messages is None:
            return ({"role": "user", "content": self.prompt},)
        return tuple(message.to_template(index) for index, message in enumerate(self.messages))


class Generate(Generation, frozen=True, kw_only=True):
    """Continue a raw prompt, given as text or as token ids; no template is applied."""

    tokens: list[int] | None = None
    echo: bool | None = None


OPERATIONS: Final[Mapping[str, type[Operation]]] = {
    "hello": Hello,
    "health": Health,
    "ready": Ready,
    "stats": Stats,
    "metrics": Metrics,
    "cancel": Cancel,
    "shutdown": Shutdown,
    "reload": Reload,
    "tokenize": Tokenize,
    "detokenize": Detokenize,
    "chat": Chat,
    "generate": Generate,
    "batch": Batch,
    "embed": Embed,
    **SESSION_OPERATIONS,
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every request has besides its own members (and `close`, which counts even if the rest is wrong)."""

    op: str
    id: RequestId | None


def read_id(members: Mapping[str, Any]) -> RequestId | None:
    """The id of a request, None if it has none. Read first, so that every other error can echo it."""
    if "id" not in members:
        return None
    value = members["id"]
    if isinstance(value, str) and 1 <= len(value) <= MAX_ID_LEN and value.isascii() and value.isprintable():
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID:
        return value
    raise BadRequest("id must be 1 to 64 printable ASCII characters or an integer from 0 to 2^53-1", field="id")


def read_envelope(members: Mapping[str, Any]) -> Envelope:
    """The envelope of a request object. Raises `bad_request`, `unsupported_version` or `unknown_op`."""
    request_id = read_id(members)
    close = members.get("close", False)
    if not isinstance(close, bool):
        raise BadRequest("close must be true or false", field="close")
    version = members.get("v", PROTOCOL_VERSION)
    if not isinstance(version, int) or isinstance(version, bool):
        raise BadRequest("v must be an integer", field="v")
    if version != PROTOCOL_VERSION:
        raise EdgeqwenError(f"only version {PROTOCOL_VERSION} is spoken here", code="unsupported_version", field="v")
    op = members.get("op")
    if not isinstance(op, str):
        raise BadRequest("op is missing or not a string", field="op")
    if op not in OPERATIONS:
        raise EdgeqwenError(f"unknown op; known are {', '.join(sorted(OPERATIONS))}", code="unknown_op", field="op")
    return Envelope(op, request_id)


def read_operation(op: str, members: Mapping[str, Any]) -> Operation:
    """The operation `op` with its own members, those of the envelope left out. Raises `BadRequest` with the field."""
    own = {name: value for name, value in members.items() if name not in ENVELOPE and not name.startswith("x_")}
    kind = OPERATIONS[op]
    given = given_members(own)
    unknown = own.keys() - given.keys() - set(kind.__struct_fields__)
    if unknown:
        raise _unknown_member(min(unknown))
    operation: Operation = convert(given, kind)
    return operation


def given_members(members: Mapping[str, Any], *, but: Collection[str] = ()) -> dict[str, Any]:
    """Those that say something: `null` is "not given", and what is in `but` does not count."""
    return {name: value for name, value in members.items() if value is not None and name not in but}


def convert(members: Mapping[str, Any], kind: type[Any]) -> Any:
    """`msgspec.convert`, with its errors turned into a `BadRequest` that names the member and repeats no value."""
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as exc:
        raise _describe(str(exc)) from exc


_AT: Final = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(.*)`$")
_EXPECTED: Final = re.compile(r"^Expected `(.*)`, got `.*`$")
_KINDS: Final = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "an array",
    "object": "an object",
}  # fmt: skip
"""msgspec's names of JSON's kinds, in the words that the checks of ranges use too."""


def _describe(text: str) -> BadRequest:
    """msgspec says what is wrong in words only: "Expected `int | null`, got `str` - at `$.top_k`"."""
    at = _AT.search(text)
    path = at[1] if at else ""
    text = text[: at.start()] if at else text
    if unknown := _UNKNOWN.match(text):
        return _unknown_member(_join(path, unknown[1]))
    if missing := _MISSING.match(text):
        path = _join(path, missing[1])
        return BadRequest(f"{path} is missing", field=path)
    if expected := _EXPECTED.match(text):
        kinds = expected[1].removesuffix(" | null").split(" | ")
        return BadRequest(f"{path} must be {' or '.join(_KINDS.get(kind, kind) for kind in kinds)}", field=path)
    return BadRequest(f"{path} is not valid", field=path or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown_member(path: str) -> BadRequest:
    # A member's name is the client's text; it is repeated so that a typing error can be found, but not at any length.
    shown = path if len(path) <= MAX_ID_LEN else path[:MAX_ID_LEN] + "..."
    return BadRequest(f"unknown member {shown}", field=shown)
