"""`edgeqwen ask`: one question, the answer streamed to stdout. Loads nothing that costs time."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to
from edgeqwen.cli.sessions import named, session_ref, warn_unless_saved
from edgeqwen.cli.streams import complain, read_text, shown, valid_text
from edgeqwen.errors import EXIT_INTERRUPTED, BadRequest, EdgeqwenError

DIM: Final = "\x1b[2m"
PLAIN: Final = "\x1b[0m"
MORE_ROOM: Final = "--max-tokens N of `edgeqwen ask` and `chat` allows more, up to the model's context"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """`think` None leaves it to the model's template. `session` is the name or id of one. `sampling` holds further
    members of the request.
    """

    socket_path: Path
    think: bool | None = None
    max_tokens: int | None = None
    seed: int | None = None
    system: str | None = None
    session: str | None = None
    is_json: bool = False
    is_verbose: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)


@click.command("ask")
@click.argument("prompt", nargs=-1)
@socket_option
@click.option("--think/--no-think", default=None, help="Let the model think first, or not. Default: its template's.")
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--session", metavar="NAME", help="Go on with this conversation, or begin it; the daemon keeps it.")
@click.option("--max-tokens", type=int, metavar="N", help="At most so many tokens.")
@click.option("--temperature", type=float, metavar="T", help="0 is greedy. Default: the model's.")
@click.option("--seed", type=int, metavar="N", help="Makes the answer repeatable.")
@click.option("--json", "is_json", is_flag=True, help="The final frame as one JSON line instead of the text.")
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Tokens and speeds on stderr.")
def command(prompt: tuple[str, ...], *, socket_path: str | None, temperature: float | None, **options: Any) -> int:
    """Ask the daemon. The prompt is the arguments, then what comes on stdin."""
    question = read_prompt(prompt)
    sampling = {} if temperature is None else {"temperature": temperature}
    return ask(question, AskOptions(socket_path=socket_to_connect_to(socket_path), sampling=sampling, **options))


def read_prompt(arguments: tuple[str, ...]) -> str:
    """Arguments joined by blanks; then, unless stdin is a terminal or absent, a blank line and what it holds.

    Raises `BadRequest` for nothing to ask, `EdgeqwenError` for what is no text.
    """
    parts = [valid_text(" ".join(arguments), "the prompt")]
    if sys.stdin is not None and not sys.stdin.isatty():
        parts.append(read_text(sys.stdin.buffer.read(), "standard input"))
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise BadRequest("nothing to ask: give a prompt as arguments or on stdin")
    return text


def ask(question: str, options: AskOptions) -> int:
    """Send the question and print the answer; returns the exit code. Raises what the daemon answers."""
    from edgeqwen.client import Client

    messages = [{"role": "user", "content": question}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": valid_text(options.system, "--system")})
    members: dict[str, Any] = {
        "messages": messages,
        "session": None if options.session is None else session_ref(options.session),
        "think": options.think,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        **options.sampling,
    }
    try:
        with _in_our_words(options), Client.connect(options.socket_path) as client:
            if options.is_json:
                final = client.request("chat", **members)
                print(json.dumps(final, ensure_ascii=False))
                sys.stdout.flush()
                warn_unless_saved(final)
                return 0
            final = show(client.stream("chat", stream=True, **members), Screen())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    warn_unless_saved(final)
    warn_if_cut(final)
    if options.is_verbose:
        print(speeds(final), file=sys.stderr)
    return 0


@contextlib.contextmanager
def _in_our_words(options: AskOptions) -> Iterator[None]:
    """What the daemon answers, as `in_words`, and beginning with the session's name if it is about that."""
    try:
        with named(**({} if options.session is None else {"session": options.session})):
            yield
    except EdgeqwenError as error:
        raise in_words(error, session=options.session, system=options.system) from error


def in_words(error: EdgeqwenError, *, session: str | None, system: str | None) -> EdgeqwenError:
    """The daemon speaks of lines and of members of a request, which tells nothing to somebody who gave options."""
    if error.code == "too_large":
        return EdgeqwenError("the prompt is too long for one request; give less text", code=error.code)
    if error.code == "bad_request" and error.field == "messages[0]" and session is not None and system is not None:
        message = (
            "--system is not the system message of the --session, which keeps the one it has; leave --system out, "
        )
        message += f"begin another session, or remove this one: edgeqwen sessions rm {shlex.quote(session)}"
        return BadRequest(shown(message, sys.stderr), field=error.field)
    return error


def warn_if_cut(final: dict[str, Any]) -> None:
    """Say on stderr if the answer ended because it had no more room."""
    if final["finish"] == "length":
        complain(f"edgeqwen: the answer was cut at {_tokens(final['usage']['completion'])}: {MORE_ROOM}")


class Screen:
    """Answer on stdout; thought on stderr, dimmed, if stderr is a terminal, else nowhere."""

    def __init__(self) -> None:
        self._shows_thought = sys.stderr.isatty()
        self._is_thinking = False
        self.text: list[str] = []

    def thought(self, text: str) -> None:
        if self._shows_thought:
            text = shown(text, sys.stderr)
            sys.stderr.write(text if self._is_thinking else DIM + text)
            sys.stderr.flush()
            self._is_thinking = True

    def answer(self, text: str) -> None:
        self._end_thought()
        self.text.append(text)
        sys.stdout.write(shown(text, sys.stdout))
        sys.stdout.flush()

    def end(self) -> None:
        """Output is whole lines: a line break after the answer, unless it ends with one or there is none."""
        self._end_thought()
        if self.text and not self.text[-1].endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _end_thought(self) -> None:
        if self._is_thinking:
            sys.stderr.write(PLAIN + "\n\n")
            sys.stderr.flush()
            self._is_thinking = False


def show(frames: Iterator[dict[str, Any]], screen: Screen) -> dict[str, Any]:
    """Print a streamed answer as it comes; returns the final frame."""
    try:
        for frame in frames:
            if reasoning := frame.get("reasoning"):
                screen.thought(reasoning)
            if delta := frame.get("delta"):
                screen.answer(delta)
            if frame["done"]:
                return frame
    finally:
        screen.end()
    raise AssertionError("a stream ends with a final frame or an error")


def speeds(final: dict[str, Any]) -> str:
    """Tokens and speeds of a final frame, in words."""
    usage, ms = final["usage"], final["ms"]
    computed, completion = usage["prompt"] - usage["cached"], usage["completion"]
    prompt = f"prompt {_tokens(usage['prompt'])}"
    if usage["cached"]:
        prompt += f" ({usage['cached']} known)"
    prompt += _rate(computed, ms["ttft"] - ms["queue"])
    answer = f"answer {_tokens(completion)}" + _rate(completion - 1, ms["total"] - ms["ttft"])
    waited = f", {ms['queue']} ms of them waiting for the model or for others" if ms["queue"] > ms["ttft"] / 10 else ""
    return f"{prompt} | {answer} | first text after {ms['ttft']} ms{waited} | ended: {final['finish']}"


def _tokens(count: int) -> str:
    return f"{count} token" + ("" if count == 1 else "s")


def _rate(num_tokens: int, duration_ms: int) -> str:
    return f", {1000 * num_tokens / duration_ms:.1f} tokens/s" if num_tokens > 0 and duration_ms > 0 else ""
