"""The clients that people have, unchanged, against a daemon: scripted if the answer does not matter, real once each."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemons import HANG_GUARD_S
from tests.served import KEY, Served, Servers, servers

USER: Final[list[dict[str, Any]]] = [{"role": "user", "content": "Say hello."}]
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Final = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}]
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
MODEL_GUARD_S: Final = 120.0
GREEDY: Final = {"temperature": 0}

pytestmark = [  # the packages leave connections to be collected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _collected_here() -> Iterator[None]:
    """Before the tests of another module, which would fail with the warnings."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def servers_() -> Iterator[Servers]:
    with servers() as started:
        yield started


@pytest.fixture(params=["plain", "real"])
def served(request: pytest.FixtureRequest, servers_: Servers) -> Served:
    found: Served = getattr(servers_, request.param)
    return found


# The openai package.


def openai_client(served: Served, **options: Any) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, **options)


def over_socket(served: Served) -> Any:
    """Its client on the Unix socket, through the transport of the HTTP library that it uses."""
    openai = pytest.importorskip("openai")
    library = next(
        sys.modules[base.__module__.partition(".")[0]]
        for base in openai.DefaultHttpxClient.__mro__
        if base.__module__.startswith("httpx")
    )
    transport = library.HTTPTransport(uds=str(served.daemon.socket_path))
    client = openai.DefaultHttpxClient(transport=transport)
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client, max_retries=0)


@pytest.mark.parametrize("way", [openai_client, over_socket])
def test_openai_chats_streamed_and_not(served: Served, way: Any) -> None:
    client = way(served)
    whole = client.chat.completions.create(model="any", messages=USER, max_tokens=12, temperature=0)
    options = {"stream_options": {"include_usage": True}}
    chunks = list(
        client.chat.completions.create(model="any", messages=USER, max_tokens=12, temperature=0, stream=True, **options)
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert [model.id for model in client.models.list()] == [whole.model]
    assert client.models.retrieve(whole.model).id == whole.model


def test_openai_completes_texts_and_tokens(served: Served) -> None:
    client = openai_client(served)
    prompts = ["Once upon", "Never again"]
    whole = client.completions.create(
        model="any", prompt=prompts, max_tokens=8, n=2, echo=True, temperature=0.5, seed=1
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith(prompts[choice.index // 2]) for choice in whole.choices] == [True] * 4
    parts = client.completions.create(model="any", prompt=[1, 2, 3], max_tokens=8, stream=True)
    assert [part.choices[0].finish_reason for part in parts][-1] in {"stop", "length"}
    scored = client.completions.create(model="any", prompt="Once upon", max_tokens=4, logprobs=3, temperature=0)
    lists = scored.choices[0].logprobs
    assert "".join(lists.tokens) == scored.choices[0].text
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset)


def test_openai_embeds(served: Served) -> None:
    client = openai_client(served)
    packed = client.embeddings.create(model="any", input=["one", "two"])  # it asks for base64 by itself
    plain = client.embeddings.create(model="any", input="two", encoding_format="float")
    assert len(packed.data) == 2
    assert packed.data[1].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)
    assert sum(value * value for value in plain.data[0].embedding) == pytest.approx(1, abs=1e-4)


def test_openai_gets_log_probabilities_and_several_choices(served: Served) -> None:
    client = openai_client(served)
    answer = client.chat.completions.create(
        model="any", messages=USER, max_tokens=6, n=3, logprobs=True, top_logprobs=2, seed=4, stop=["\n\n"]
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == choice.message.content
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_openai_calls_a_tool_and_goes_on(servers_: Servers) -> None:
    client = openai_client(servers_.calling)
    asked = [{"role": "user", "content": "How is Kyiv?"}]
    whole = client.chat.completions.create(model="any", messages=asked, tools=TOOLS)
    message = whole.choices[0].message
    (call,) = message.tool_calls
    assert (whole.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"city": "Kyiv"})
    with client.chat.completions.stream(model="any", messages=asked, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    again = client.chat.completions.create(model="any", messages=[*asked, message, result], tools=TOOLS)
    assert again.choices[0].message.tool_calls


def test_openai_demands_a_tool_of_the_real_model(servers_: Servers) -> None:
    client = openai_client(servers_.real, timeout=MODEL_GUARD_S)
    choice = {"type": "function", "function": {"name": "look"}}
    given: dict[str, Any] = {"model": "any", "messages": USER, "tools": TOOLS, "max_tokens": 150, **GREEDY}
    for wanted in ("required", choice):
        answer = client.chat.completions.create(**given, tool_choice=wanted, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_openai_gets_the_real_model_to_keep_to_a_form(servers_: Servers) -> None:
    client = openai_client(servers_.real, timeout=MODEL_GUARD_S)
    answer = client.chat.completions.create(
        model="any", messages=USER, response_format=FORMAT, max_tokens=100, temperature=1, seed=2
    )
    person = json.loads(answer.choices[0].message.content)
    assert sorted(person) == ["age", "name"]
    assert 0 <= person["age"] <= 9
    cut = client.chat.completions.create(model="any", messages=USER, response_format=FORMAT, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"


def test_openai_thinks_when_told(servers_: Servers) -> None:
    client = openai_client(servers_.thinking)
    answer = client.chat.completions.create(
        model="any", messages=USER, reasoning_effort="low", extra_body={"thinking_budget": 50}
    )
    assert (answer.choices[0].message.content, answer.choices[0].message.reasoning_content.strip()) == ("four", "hm")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_openai_raises_what_went_wrong(servers_: Servers) -> None:
    openai = pytest.importorskip("openai")
    client = openai_client(servers_.plain)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=USER, temperature=101)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    stranger = openai.OpenAI(base_url=f"{servers_.plain.url}/v1", api_key="a-key-of-nobody", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_ten_asynchronous_requests_at_once(served: Served) -> None:
    openai = pytest.importorskip("openai")

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as client:
            create = client.chat.completions.create
            jobs = [create(model="any", messages=USER, max_tokens=8, temperature=0) for _ in range(10)]
            return await asyncio.gather(*jobs)

    answers = asyncio.run(ask_all())
    assert len({answer.id for answer in answers}) == 10
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_a_stream_that_is_closed_ends_what_it_had_begun(servers_: Servers) -> None:
    served = servers_.endless
    for way in (openai_client, over_socket):
        with way(served) as client:
            stream = client.chat.completions.create(model="any", messages=USER, stream=True, max_tokens=90_000)
            next(iter(stream))
            served.daemon.wait_for(running=1)
            stream.close()
        served.daemon.wait_for(running=0)


# LangChain.


@pytest.mark.parametrize("kind", ["thinking", "real"])
def test_langchain_chats_and_works_through_a_batch(servers_: Servers, kind: str) -> None:
    served = getattr(servers_, kind)
    langchain = pytest.importorskip("langchain_openai")
    extra = {"enable_thinking": True, "return_reasoning": True}
    given = {"model": "any", "max_tokens": 20, "extra_body": extra, "max_retries": 0, **GREEDY}
    chat = langchain.ChatOpenAI(base_url=f"{served.url}/v1", api_key=served.key, **given)
    answer = chat.invoke("Say hello.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert [bool(each.content) for each in chat.batch(["one", "two", "three"])] == [True] * 3
    assert "".join(chunk.content for chunk in chat.stream("Say hello."))


def test_langchain_thinks_and_calls_tools(servers_: Servers) -> None:
    langchain = pytest.importorskip("langchain_openai")

    def chat(served: Served, **options: Any) -> Any:
        return langchain.ChatOpenAI(base_url=f"{served.url}/v1", api_key=served.key, model="any", **options)

    thought = chat(servers_.thinking, extra_body={"enable_thinking": True}).invoke("x")
    assert thought.content == "four"
    assert thought.usage_metadata["output_token_details"]["reasoning"] > 0
    calls = chat(servers_.calling).bind_tools(TOOLS).invoke("x").tool_calls
    assert [(call["name"], call["args"]) for call in calls] == [("look", {"city": "Kyiv"})]


def test_langchain_embeds(served: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    # Otherwise it sends token ids of another model's tokenizer.
    embeddings = langchain.OpenAIEmbeddings(
        base_url=f"{served.url}/v1", api_key=served.key, model="any", check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_documents(["one", "two"])) == 2


# The anthropic package.


def anthropic_client(served: Served) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0)


def test_anthropic_messages_streamed_and_not(served: Served) -> None:
    client = anthropic_client(served)
    given: dict[str, Any] = {"model": "any", "max_tokens": 12, "system": "Be brief.", "messages": USER}
    whole = client.messages.create(**given, extra_body=GREEDY)
    with client.messages.stream(**given, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason in {"end_turn", "max_tokens"}
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    counted = client.messages.count_tokens(model="any", system="Be brief.", messages=USER)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert [model.id for model in client.models.list()] == [whole.model]


def test_anthropic_calls_a_tool_and_goes_on(servers_: Servers) -> None:
    client = anthropic_client(servers_.calling)
    tools = [{"name": "look", "description": "Look.", "input_schema": PARAMETERS}]
    given: dict[str, Any] = {"model": "any", "max_tokens": 200, "tools": tools}
    asked = [{"role": "user", "content": "How is Kyiv?"}]
    whole = client.messages.create(**given, messages=asked)
    with client.messages.stream(**given, messages=asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert (message.content[0].name, message.content[0].input) == ("look", {"city": "Kyiv"})
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "Sunny."}
    turns = [*asked, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**given, messages=turns).stop_reason == "tool_use"


def test_anthropic_thinks_when_told_and_raises_what_went_wrong(servers_: Servers) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic_client(servers_.thinking)
    thinking = {"type": "enabled", "budget_tokens": 50}
    message = client.messages.create(model="any", max_tokens=100, thinking=thinking, messages=USER)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking.strip() == "hm"
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="any", max_tokens=10, messages=USER, extra_body={"temperature": 101})


# Programs.


def executable(name: str) -> str:
    """The path of a program, beside the interpreter too; skips the test where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str, stdin: str = "", environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, timeout=120, env=os.environ | (environ or {})
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llm_asks_streamed_and_not(served: Served, tmp_path: Path) -> None:
    program = executable("llm")
    models = [{"model_id": "local", "model_name": "any", "api_base": f"{served.url}/v1", "api_key_name": "local"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    environ = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    run(program, "keys", "set", "local", "--value", served.key, environ=environ)
    flags = ("-m", "local", "-o", "max_tokens", "10", "-o", "temperature", "0", "Say hello.")
    streamed = run(program, *flags, environ=environ)
    whole = run(program, "--no-stream", *flags, environ=environ)
    assert streamed.strip() == whole.strip() != ""


def test_requests_keeps_a_conversation(served: Served) -> None:
    requests = pytest.importorskip("requests")
    name = f"talk-{time.monotonic_ns()}"
    counts = []
    for text in ("My name is Ada.", "What is my name?"):
        body = {"messages": [{"role": "user", "content": text}], "conversation_id": name, "max_tokens": 8}
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = requests.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=HANG_GUARD_S)
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"])
    assert counts[1]["prompt_tokens"] > counts[0]["prompt_tokens"] + counts[0]["completion_tokens"] - 2
    assert counts[1]["prompt_tokens_details"]["cached_tokens"] > 0


def test_curl_asks_over_the_socket_and_over_the_port(served: Served) -> None:
    curl = executable("curl")
    body = json.dumps({"messages": USER, "max_tokens": 8, "temperature": 0})
    common = (curl, "-sS", "--fail-with-body", "-H", "Content-Type: application/json", "-d", body)
    socket = ("--unix-socket", str(served.daemon.socket_path))
    over_port = run(*common, "-H", f"x-api-key: {KEY}", f"{served.url}/v1/chat/completions")
    over_socket_ = run(*common, *socket, "http://x/v1/chat/completions")
    messages = [json.loads(text)["choices"][0]["message"]["content"] for text in (over_port, over_socket_)]
    assert messages[0] == messages[1] != ""
    streamed = run(curl, "-sSN", *socket, "http://x/eqp/chat", "-d", '{"prompt":"x","stream":true,"max_tokens":4}')
    assert [json.loads(line)["done"] for line in streamed.splitlines()][-1] is True


NODE: Final = """
const [url, key, path] = process.argv.slice(1);
const http = require("node:http");
const body = JSON.stringify({ messages: [{ role: "user", content: "x" }], max_tokens: 8, temperature: 0 });

function overSocket() {
  return new Promise((resolve, reject) => {
    const options = { socketPath: path, path: "/v1/chat/completions", method: "POST" };
    const request = http.request(options, (response) => {
      let text = "";
      response.setEncoding("utf8");
      response.on("data", (piece) => { text += piece; });
      response.on("end", () => resolve(JSON.parse(text)));
    });
    request.on("error", reject);
    request.end(body);
  });
}

async function main() {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${key}` };
  const whole = await (await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body })).json();
  const streamed = await fetch(`${url}/v1/chat/completions`, {
    method: "POST", headers, body: JSON.stringify({ ...JSON.parse(body), stream: true }),
  });
  let text = "";
  for await (const piece of streamed.body) text += Buffer.from(piece).toString("utf8");
  const events = text.trim().split("\\n\\n").map((event) => event.slice("data: ".length));
  const said = events.slice(0, -1).map((event) => JSON.parse(event).choices[0].delta.content ?? "").join("");
  const answers = [whole, await overSocket()].map((answer) => answer.choices[0].message.content);
  console.log(JSON.stringify([...answers, said, events.at(-1)]));
}
main().catch((error) => { console.error(error); process.exit(1); });
"""


def test_node_fetches_over_the_port_and_asks_over_the_socket(served: Served) -> None:
    node = executable("node")
    output = run(node, "-e", NODE, served.url, KEY, str(served.daemon.socket_path))
    *answers, end = json.loads(output)
    assert answers[0] == answers[1] == answers[2] != ""
    assert end == "[DONE]"
