"""What the fuzzing begins with: valid requests of every operation, as lines, and of every route, over HTTP."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Final

SESSIONS: Final = ("@one", "@two", "@three", "@four")
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: Final = {"type": "function", "function": {"name": "light", "description": "Turn it on", "parameters": SCHEMA}}
TURNS: Final = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue? 🫠 龘"}]
LONG_HISTORY: Final = [
    *TURNS,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "light", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "on"},
]

LINES: Final[tuple[dict[str, Any], ...]] = (
    {"op": "hello"},
    {"op": "health"},
    {"op": "ready"},
    {"op": "stats"},
    {"op": "chat", "prompt": "Hi", "max_tokens": 4},
    {
        "op": "chat",
        "messages": TURNS,
        "stream": True,
        "max_tokens": 12,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "seed": 7,
        "stop": ["\n\n"],
        "think": False,
    },
    {"op": "chat", "messages": LONG_HISTORY, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 6, "verbose": True},
    {"op": "chat", "prompt": "Hi", "n": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 3, "priority": "high"},
    {"op": "chat", "prompt": "Hi", "max_tokens": 6, "think": True, "think_budget": 2, "deadline_ms": 60_000},
    {
        "op": "chat",
        "prompt": "Hi",
        "max_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    {
        "op": "chat",
        "prompt": "Hi",
        "max_tokens": 8,
        "response_format": {"type": "regex", "regex": "[ab]{1,5}"},
        "min_p": 0.1,
    },
    {"op": "chat", "session": SESSIONS[0], "prompt": "21 C", "max_tokens": 4},
    {"op": "chat", "session": SESSIONS[1], "messages": TURNS, "max_tokens": 4, "stream": True},
    {
        "op": "generate",
        "prompt": "Once upon",
        "echo": True,
        "max_tokens": 8,
        "presence_penalty": 1,
        "frequency_penalty": -1,
    },
    {
        "op": "generate",
        "tokens": [1, 2, 3],
        "max_tokens": 8,
        "logprobs": True,
        "logit_bias": {"40": 1.5},
        "ignore_eos": True,
        "stream": True,
    },
    {
        "op": "generate",
        "prompt": "a",
        "max_tokens": 300,
        "min_tokens": 200,
        "cache": False,
        "speculate": False,
        "repetition_penalty": 1.1,
        "stream": True,
    },
    {"op": "embed", "texts": ["A lamp", "A lighthouse"], "pooling": "last"},
    {"op": "embed", "tokens": [[1, 2, 3]], "pooling": "mean"},
    {
        "op": "batch",
        "each": "chat",
        "items": [{"prompt": "a"}, {"prompt": "b", "max_tokens": 2}],
        "common": {"max_tokens": 3},
    },
    {"op": "batch", "each": "embed", "items": [{"texts": ["a"]}, {"tokens": [[1]]}]},
    {"op": "tokenize", "text": "Hello <|im_end|>", "special": True},
    {"op": "detokenize", "tokens": [40, 41, 255]},
    {"op": "cancel", "target": 1},
    {"op": "cancel", "rid": "r1"},
    {"op": "session.create", "name": "five", "system": "You are a thermostat.", "ttl_s": 3600, "overflow": "truncate"},
    {"op": "session.get", "session": SESSIONS[0], "messages": True},
    {"op": "session.list"},
    {"op": "session.fork", "session": SESSIONS[0], "at": 0},
    {"op": "session.fork", "session": SESSIONS[1], "name": "six"},
    {"op": "session.reset", "session": SESSIONS[2], "keep_system": False},
    {"op": "session.delete", "session": SESSIONS[3]},
    {"op": "session.delete", "session": "@five"},
    {"op": "session.delete", "session": "@six"},
)

EXPECTED_ERRORS: Final = frozenset({
    "busy",
    "quota",
    "session_busy",
    "conflict",
    "not_found",
    "too_long",
    "bad_request",
})
"""What a seed may be answered beside a result: others got there before it, or its session has grown full."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request of HTTP; a `body` of bytes is sent as it is, another one as JSON."""

    method: str
    path: str
    body: Any = None
    is_for_strangers: bool = False  # sent over TCP only, where nobody is an admin

    def data(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


CHAT: Final = {"model": "any", "messages": TURNS, "max_tokens": 4}
CALLS: Final[tuple[Call, ...]] = (
    *(Call("POST", "/eqp/" + line["op"], {key: value for key, value in line.items() if key != "op"}) for line in LINES),
    *(Call("GET", path) for path in ("/health", "/ready", "/stats", "/v1/models", "/v1/models/model")),
    Call("POST", "/v1/chat/completions", CHAT),
    Call("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    Call("POST", "/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": "x", "seed": 1}),
    Call("POST", "/v1/chat/completions", {**CHAT, "conversation_id": "talk", "enable_thinking": True}),
    Call("POST", "/v1/chat/completions", {**CHAT, "messages": LONG_HISTORY, "tools": [TOOL], "tool_choice": "auto"}),
    Call("POST", "/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    Call("POST", "/v1/completions", {"model": "any", "prompt": ["a", "b"], "max_tokens": 3, "echo": True}),
    Call("POST", "/v1/completions", {"model": "any", "prompt": [1, 2, 3], "max_tokens": 3, "stream": True}),
    Call("POST", "/v1/embeddings", {"model": "any", "input": ["a", "b"], "encoding_format": "base64"}),
    Call("POST", "/v1/tokenize", {"model": "any", "prompt": "Hello"}),
    Call("POST", "/v1/detokenize", {"model": "any", "tokens": [40, 41]}),
    Call("POST", "/v1/messages", {"model": "any", "max_tokens": 4, "messages": TURNS[1:], "system": "Be brief."}),
    Call("POST", "/v1/messages", {"model": "any", "max_tokens": 4, "messages": TURNS[1:], "stream": True}),
    Call("POST", "/v1/messages/count_tokens", {"model": "any", "messages": TURNS[1:]}),
    Call("POST", "/eqp/batch", [{"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2}]),
    Call("POST", "/eqp/batch", b'{"prompt":"a","max_tokens":2}\n{"prompt":"b","max_tokens":2}\n{"prompt":3}\n'),
    Call("POST", "/eqp/shutdown", {"drain_s": 1}, is_for_strangers=True),
    Call("OPTIONS", "/v1/chat/completions"),
)


def some_line(rng: random.Random, request_id: int) -> dict[str, Any]:
    """A valid request with an id, or, one in five, without."""
    line = dict(rng.choice(LINES))
    if "session" in line and rng.random() < 0.5:
        line["session"] = rng.choice(SESSIONS)
    return line if rng.random() < 0.2 else {"id": request_id if rng.random() < 0.8 else f"r{request_id}", **line}


def some_call(rng: random.Random, *, is_stranger: bool) -> Call:
    return rng.choice([call for call in CALLS if is_stranger or not call.is_for_strangers])
