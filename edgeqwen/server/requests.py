"""From a `chat` or `generate` to whoever runs it: the engine, or a session's turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeqwen.engine.generation import GenerationInput
from edgeqwen.engine.inference import Inference
from edgeqwen.errors import BadRequest
from edgeqwen.protocol.messages import Chat, Generate, Generation
from edgeqwen.server.work import Submit
from edgeqwen.sessions.sessions import Sessions
from edgeqwen.sessions.turns import TurnRequest


@dataclass(frozen=True, slots=True)
class Submission:
    """How a generation is handed over, and what its final frame says besides."""

    submit: Submit
    final_members: Callable[[], Mapping[str, Any]] = dict


def read_submission(message: Generation, owner: str, inference: Inference, sessions: Sessions) -> Submission:
    """Raises `BadRequest`."""
    given = generation_input(message)
    if isinstance(message, Chat) and message.session is not None:
        request = TurnRequest(owner=owner, ref=message.session, given=given, if_rev=message.if_rev)
        turn = sessions.turn(request)
        return Submission(turn.submit, turn.members)
    if isinstance(message, Chat) and message.if_rev is not None:
        raise BadRequest("if_rev is the revision of a session: give session too", field="if_rev")
    return Submission(lambda sink: inference.submit(given, owner=owner, sink=sink))


def generation_input(message: Generation) -> GenerationInput:
    """What the engine reads of a `chat` or `generate`."""
    own = {name: getattr(message, name) for name in ("wait", "speculate", "cache", "priority", "response_format")}
    members = message.to_input() | own
    match message:
        case Chat():
            chat = ("tool_choice", "parallel_tool_calls", "think", "think_budget")
            members |= {name: getattr(message, name) for name in chat}
            members |= {"messages": message.turns(), "tools": tuple(message.tools or ())}
        case Generate():
            if (message.prompt is None) == (message.tokens is None):
                raise BadRequest("give either prompt or tokens", field="prompt")
            tokens = None if message.tokens is None else tuple(message.tokens)
            members |= {"prompt": message.prompt, "tokens": tokens, "echo": message.echo}
    return GenerationInput(**members)
