"""One chat through every front of a running daemon: socket and HTTP, streamed and not, and the shell client."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from edgeqwen.errors import EdgeqwenError
from tests.daemons import HANG_GUARD_S, DaemonProcess, run_command
from tests.qwen_files import DATA, qwen_tokenizer_path

Front: TypeAlias = Literal["socket", "socket stream", "http", "http stream", "ask"]
FRONTS: Final[tuple[Front, ...]] = get_args(Front)
WITHOUT_ASK: Final[tuple[Front, ...]] = tuple(front for front in FRONTS if front != "ask")
CHAT_PATH: Final = "/v1/chat/completions"
HTTP_NAMES: Final = {"think": "enable_thinking"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one front gave. The shell client gives `content` only; its other members are None or empty.

    `refused` is the field that an error names, with the HTTP status or the socket's code before it. `raw` is what came
    over the connection.
    """

    content: str
    reasoning: str = ""
    finish: str | None = None
    completion: int | None = None
    prompt: int | None = None
    refused: tuple[int | str, str | None] | None = None
    prompt_ids: tuple[int, ...] = ()
    deltas: tuple[str, ...] = ()
    raw: Any = None


def write_qwen_model(folder: Path, **generation_config: Any) -> Path:
    """Qwen3's tokenizer and template with greedy defaults, for a scripted runtime."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").symlink_to(qwen_tokenizer_path())
    shutil.copy(DATA / "qwen3_chat_template.jinja", folder / "chat_template.jinja")
    defaults = {"do_sample": False, "eos_token_id": [151645, 151643]}
    (folder / "generation_config.json").write_text(json.dumps(defaults | generation_config))
    return folder


def chat(daemon: DaemonProcess, front: Front, **members: Any) -> Answer:
    """Send a chat with the members of the socket protocol, translated for the front."""
    if front == "ask":
        return ask(daemon, **members)
    if front == "socket":
        return _socket_answer([call(daemon, "chat", **members)])
    if front == "socket stream":
        return _socket_answer(stream(daemon, "chat", **members))
    body = {HTTP_NAMES.get(name, name): value for name, value in members.items()}
    status, data = post(daemon, CHAT_PATH, {"model": "any", **body, "stream": front == "http stream"})
    if status != 200:
        error = json.loads(data)["error"]
        return Answer("", refused=(status, error["param"]), raw=error)
    return _http_answer(json.loads(data)) if front == "http" else _http_stream_answer(data.decode("utf-8"))


def call(daemon: DaemonProcess, op: str, **members: Any) -> dict[str, Any]:
    """The final frame of an operation, or the error as a frame."""
    with daemon.client() as client:
        try:
            return client.request(op, **members)
        except EdgeqwenError as error:
            return {"error": error.code, "field": error.field, "message": error.message}


def stream(daemon: DaemonProcess, op: str, **members: Any) -> list[dict[str, Any]]:
    """All frames of a streamed operation: one start, deltas, exactly one final frame."""
    with daemon.client() as client:
        try:
            frames = list(client.stream(op, **members, stream=True))
        except EdgeqwenError as error:
            return [{"error": error.code, "field": error.field, "message": error.message}]
        assert [frame["done"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert [frame.get("event") for frame in frames[:-1]] == ["start"] + [None] * (len(frames) - 2)
        return frames


def ask(daemon: DaemonProcess, **members: Any) -> Answer:
    """`edgeqwen ask` with the one question of `messages`."""
    flags: list[str] = ["--socket", str(daemon.socket_path)]
    (question,) = members.pop("messages")
    for name, value in members.items():
        if name == "think":
            flags.append("--think" if value else "--no-think")
        else:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    result = run_command("ask", *flags, question["content"])
    assert result.returncode == 0, result.stderr
    assert result.stderr == b"" or (b"the answer was cut at" in result.stderr and result.stderr.count(b"\n") == 1)
    return Answer(result.stdout.decode("utf-8").removesuffix("\n"), raw=result.stdout)


def post(daemon: DaemonProcess, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
    """Status and body of a POST to the daemon's socket."""
    connection = _UnixConnection(daemon.socket_path)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=HANG_GUARD_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(HANG_GUARD_S)
        self.sock.connect(str(self._path))


def _socket_answer(frames: list[dict[str, Any]]) -> Answer:
    final = frames[-1]
    if "error" in final:
        return Answer("", refused=(final["error"], final["field"]), raw=final)
    deltas = tuple(frame.get("delta", "") for frame in frames[1:-1]) if len(frames) > 1 else ()
    is_whole = len(frames) == 1
    return Answer(
        content=final["text"] if is_whole else "".join(deltas),
        reasoning=final.get("reasoning", "") if is_whole else "".join(f.get("reasoning", "") for f in frames),
        finish=final["finish"],
        completion=final["usage"]["completion"],
        prompt=final["usage"]["prompt"],
        prompt_ids=tuple(final.get("prompt_ids", frames[0].get("prompt_ids", ()))),
        deltas=tuple(filter(None, deltas)),
        raw=frames,
    )


def _http_answer(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    return Answer(
        content=choice["message"]["content"],
        reasoning=choice["message"].get("reasoning_content", ""),
        finish=choice["finish_reason"],
        completion=body["usage"]["completion_tokens"],
        prompt=body["usage"]["prompt_tokens"],
        raw=body,
    )


def _http_stream_answer(text: str) -> Answer:
    *events, last = text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    finishes = [chunk["finish_reason"] for chunk in chunks]
    assert finishes[:-1] == [None] * (len(chunks) - 1)
    deltas = tuple(chunk["delta"].get("content", "") for chunk in chunks)
    return Answer(
        content="".join(deltas),
        reasoning="".join(chunk["delta"].get("reasoning_content", "") for chunk in chunks),
        finish=finishes[-1],
        deltas=tuple(filter(None, deltas)),
        raw=chunks,
    )
