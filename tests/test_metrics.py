"""What is measured, as Prometheus reads it: right by its own parser, about everybody, and never about what was said."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.errors import BadRequest
from edgeqwen.http.access import ApiKeys, HttpAccess
from edgeqwen.metrics import CONTENT_TYPE, Exposition, Histogram, process_facts
from edgeqwen.protocol.peer import Peer
from edgeqwen.server.exporter import Exporter
from tests.http_client import connect
from tests.test_network import LOCAL, ONE, key, listening
from tests.wire import Wire, fake_inference, serve

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client's parser is not installed")

ROOT: Final = Path(__file__).parent.parent
METRICS: Final = {"op": "metrics"}
FAMILIES_OF_OTHERS: Final = "process_"


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Sample name and labels to value, none of them twice."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in found, place
            found[place] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples_of(text)[name, tuple(sorted(labels.items()))]


async def metrics(wire: Wire) -> str:
    """What an admin is told on the socket."""
    client = await wire.connect()
    text = (await client.ask(METRICS))["text"]
    client.close()
    assert isinstance(text, str)
    return text


# The format.


def test_a_value_on_a_bound_belongs_to_the_class_below() -> None:
    histogram = Histogram((1.0, 2.0))
    for each in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(each)
    assert (histogram.cumulative(), histogram.count, histogram.sum) == ((2, 4, 5), 5, 7.5)


@given(
    bounds=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8, unique=True).map(sorted),
    values=st.lists(st.floats(-1e7, 1e7), max_size=50),
)
def test_every_bound_counts_the_values_up_to_it(bounds: list[float], values: list[float]) -> None:
    histogram = Histogram(bounds)
    for each in values:
        histogram.observe(each)
    expected = [sum(each <= bound for each in values) for bound in (*bounds, math.inf)]
    assert list(histogram.cumulative()) == expected
    assert histogram.sum == pytest.approx(sum(values))


@given(
    label=st.text(),
    meaning=st.text(st.characters(exclude_categories=["Cs"])),
    number=st.floats(allow_nan=False) | st.integers(-(10**9), 10**9),
)
def test_whatever_stands_in_labels_and_help_is_read_back(label: str, meaning: str, number: float) -> None:
    page = Exposition()
    page.gauge("a_gauge", meaning, number, (("label", label),))
    page.counter("a_total", "one", 1)
    gauge, counter = parser.text_string_to_metric_families(page.text())
    assert (gauge.samples[0].labels, gauge.samples[0].value) == ({"label": label}, number)
    assert (counter.name, counter.type, counter.samples[0].name) == ("a", "counter", "a_total")


@given(values=st.lists(st.floats(0, 100), max_size=40), bounds=st.sets(st.floats(0, 100), min_size=1, max_size=6))
def test_histograms_are_read_back_cumulative_and_consistent(values: list[float], bounds: set[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for each in values:
        histogram.observe(each)
    page = Exposition()
    page.histograms("h_seconds", "time", {(("kind", "x"),): histogram})
    found = samples_of(page.text())
    check_histograms(found)
    assert found["h_seconds_count", (("kind", "x"),)] == len(values)
    assert found["h_seconds_bucket", (("kind", "x"), ("le", "+Inf"))] == len(values)


def check_histograms(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> int:
    """Assert of each that its classes ascend to its count; how many there are."""
    classes: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for (name, labels), number in found.items():
        if name.endswith("_bucket"):
            rest = tuple(pair for pair in labels if pair[0] != "le")
            classes.setdefault((name.removesuffix("_bucket"), rest), []).append((float(dict(labels)["le"]), number))
    for (name, labels), pairs in classes.items():
        assert [bound for bound, _ in pairs] == sorted(bound for bound, _ in pairs)
        counts = [count for _, count in pairs]
        assert counts == sorted(counts)
        assert pairs[-1] == (math.inf, found[f"{name}_count", labels])
        assert (found[f"{name}_sum", labels] == 0) or counts[-1] > 0
    return len(classes)


def complaints_of_promtool(text: str) -> bytes:
    command = ["promtool", "check", "metrics"]
    lint = subprocess.run(command, input=text.encode(), capture_output=True, timeout=60, check=False)
    return lint.stdout + lint.stderr


def test_the_linter_complains_of_what_is_wrong() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    assert b"edgeqwen_x" in complaints_of_promtool("# TYPE edgeqwen_x counter\nedgeqwen_x 1\n")


# What is told.


async def test_what_is_told_is_read_by_prometheus_parser_and_its_linter(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        client = await wire.connect()
        await client.ask({"op": "chat", "prompt": "x"})
        text = await metrics(wire)
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert all(family.type != "unknown" for family in families)
    assert all(family.name.startswith(("edgeqwen_", FAMILIES_OF_OTHERS)) for family in families)
    assert check_histograms(samples_of(text)) == 9
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: the linter was not asked")
    assert complaints_of_promtool(text) == b""


async def test_requests_are_counted_by_their_ends_with_their_times_and_tokens(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        client = await wire.connect()
        tokens = 0
        for limit in (1, 2, 64):
            tokens += (await client.ask({"op": "chat", "prompt": "hello", "max_tokens": limit}))["usage"]["completion"]
        await client.ask({"op": "embed", "texts": ["one", "two"]})
        assert "error" in await client.ask({"op": "chat", "prompt": "hello", "max_tokens": -1})
        text = await metrics(wire)
    assert value(text, "edgeqwen_requests_total", kind="generation", outcome="length") == 2
    assert value(text, "edgeqwen_requests_total", kind="generation", outcome="stop") == 1
    assert value(text, "edgeqwen_requests_total", kind="embedding", outcome="stop") == 1
    assert value(text, "edgeqwen_refused_total", code="bad_request") == 1
    assert value(text, "edgeqwen_tokens_generated_total") == tokens
    assert value(text, "edgeqwen_time_between_tokens_seconds_count") == tokens - 3
    assert value(text, "edgeqwen_time_to_first_token_seconds_count") == 3
    assert value(text, "edgeqwen_queue_wait_seconds_count") == 4
    assert value(text, "edgeqwen_request_duration_seconds_count", kind="generation") == 3
    assert value(text, "edgeqwen_tokens_cached_total") > 0
    assert value(text, "edgeqwen_connections") == 2


async def test_counters_never_fall_whatever_happens(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(fail_at_step=9)) as wire:
        client = await wire.connect()
        before: dict[Any, float] = {}
        for number in range(6):
            await client.ask({"op": "chat", "prompt": "x" * (20 * number + 1), "max_tokens": 4})
            if number == 3:
                await wire.inference.until_settled()
                while not wire.inference.fall_asleep():
                    await client.ask({"op": "health"})
                await wire.inference.until_settled()
            text = await metrics(wire)
            kinds = {family.name: family.type for family in parser.text_string_to_metric_families(text)}
            counted = {
                place: number
                for place, number in samples_of(text).items()
                if kinds.get(place[0]) == "histogram" or place[0].endswith(("_total", "_bucket", "_sum", "_count"))
            }
            assert all(counted[place] >= number for place, number in before.items())
            assert before.keys() <= counted.keys()
            before = counted
    assert before["edgeqwen_requests_total", (("kind", "generation"), ("outcome", "engine"))] == 1


async def test_the_same_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    async with serve(tmp_path, fake_inference(load_s=0.3), is_loaded=False) as wire:
        early = await metrics(wire)
        await (await wire.connect()).ask({"op": "chat", "prompt": "x"})
        late = await metrics(wire)
    assert value(early, "edgeqwen_model_state", state="loading") == 1
    assert value(late, "edgeqwen_model_state", state="ready") == 1
    assert samples_of(early).keys() == samples_of(late).keys()


async def test_nothing_that_clients_say_or_are_called_is_told(tmp_path: Path) -> None:
    secret = "unheard"
    async with serve(tmp_path) as wire:
        client = await wire.connect()
        await client.ask({"op": "session.create", "name": secret})
        await client.ask({"op": "chat", "prompt": secret, "session": f"@{secret}", "stop": [secret]})
        await client.ask({"op": "chat", "prompt": "x", secret: 1})
        await client.ask({"op": secret})
        text = await metrics(wire)
    assert secret not in text
    labels = {label for _, pairs in samples_of(text) for label, _ in pairs}
    assert labels == {
        "model", "quant", "version", "state", "kind", "outcome", "code", "tier", "place", "status", "result", "le",
    }  # fmt: skip
    assert len(samples_of(text)) < 400, "labels are few"


async def test_the_process_is_told_under_the_usual_names(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        text = await metrics(wire)
    facts = process_facts()
    assert value(text, "process_start_time_seconds") == facts.start_s
    assert 0 < value(text, "process_cpu_seconds_total") <= facts.cpu_s
    assert value(text, "process_threads") >= 2
    assert 0 < value(text, "process_open_fds") < value(text, "process_max_fds")
    assert 0 < value(text, "process_resident_memory_bytes") < value(text, "process_virtual_memory_bytes")


async def test_connections_that_are_turned_away_are_counted(tmp_path: Path) -> None:
    from edgeqwen.protocol.limits import WireLimits

    async with serve(tmp_path, limits=WireLimits(connections_per_uid=1)) as wire:
        clients = [await wire.connect() for _ in range(2)]  # one more is kept for an admin
        for client in clients:
            await client.ask({"op": "health"})
        turned_away = await wire.connect()
        refusal = await turned_away.read()
        assert refusal is not None
        assert refusal["error"]["code"] == "quota"
        text = (await clients[0].ask(METRICS))["text"]
    assert value(text, "edgeqwen_connections_refused_total", code="quota") == 1
    assert value(text, "edgeqwen_connections") == 2


async def test_errors_of_lines_and_responses_of_http_are_counted(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        client = await wire.connect()
        batch = {"op": "batch", "items": [{"prompt": "x", "n": 99}, {"prompt": "x"}]}
        for line in ({"op": "nothing"}, {"op": "chat"}, {"op": "session.get", "session": "@none"}, batch):
            await client.ask(line)
        broken = await wire.connect()
        broken.write(b"{]\n")
        await broken.read()
        http = await connect(wire)
        for path in ("/health", "/metrics", "/nothing"):
            await http.ask("GET", path)
        text = await metrics(wire)
    errors = {code: value(text, "edgeqwen_line_errors_total", code=code) for code in ("unknown_op", "not_found")}
    assert errors == {"unknown_op": 1, "not_found": 1}
    assert value(text, "edgeqwen_line_errors_total", code="bad_request") == 2, "one of them an item of a batch"
    assert value(text, "edgeqwen_line_errors_total", code="bad_json") == 1
    assert value(text, "edgeqwen_http_responses_total", status="200") == 2
    assert value(text, "edgeqwen_http_responses_total", status="404") == 1


async def test_reloads_are_counted_by_how_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(tmp_path) as wire:
        wire.server.operations.on_reload("a signal")
        text = await metrics(wire)

        def fail(_: str) -> dict[str, Any]:
            raise BadRequest("no")

        exporter = Exporter(wire.inference, wire.server.sessions, num_connections=lambda: 0, num_accepted=lambda: 0)
        with pytest.raises(BadRequest):
            exporter.counting(fail)("a signal")
        failed = exporter.text_for(Peer(0, "0", is_admin=True))
    assert [value(text, "edgeqwen_reloads_total", result=result) for result in ("ok", "failed")] == [1, 0]
    assert [value(failed, "edgeqwen_reloads_total", result=result) for result in ("ok", "failed")] == [0, 1]


# Who may read it.


async def test_http_gives_the_same_text_with_the_formats_type(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        client = await connect(wire)
        answer = await client.ask("GET", "/metrics")
        assert (answer.status, answer.headers["content-type"]) == (200, CONTENT_TYPE)
        assert samples_of(answer.body.decode()).keys() == samples_of(await metrics(wire)).keys()
        client.send("HEAD", "/metrics")
        status, headers = await client.read_head()
        assert (status, headers["content-type"]) == (200, CONTENT_TYPE)
        assert int(headers["content-length"]) > 1000
        assert (await client.ask("GET", "/health")).status == 200, "HEAD has no body"
        assert (await client.ask("POST", "/metrics", {})).status == 405


@pytest.mark.parametrize("is_open", [False, True])
async def test_others_than_admins_are_told_only_if_the_configuration_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_open: bool
) -> None:
    monkeypatch.setattr("edgeqwen.server.connection.peer_of", lambda _: Peer(1001, "1001", is_admin=False))
    async with serve(tmp_path, access=HttpAccess(has_open_metrics=is_open)) as wire:
        frame = await (await wire.connect()).ask(METRICS)
        answer = await (await connect(wire)).ask("GET", "/metrics")
        assert ("text" in frame) == is_open
        assert answer.status == (200 if is_open else 403)
        if not is_open:
            assert "http.metrics" in frame["error"]["message"]
            assert "http.metrics" in answer.json["error"]["message"]


async def test_over_the_network_they_are_for_nobody_until_opened_and_keys_count(tmp_path: Path) -> None:
    keys = ApiKeys((ONE,))
    async with listening(tmp_path, keys=keys) as (wire, port):
        client = await port.connect()
        assert (await client.ask("GET", "/metrics", headers=key(ONE))).status == 403
        wire.server.set_access(HttpAccess(keys=keys, has_open_metrics=True))
        assert (await client.ask("GET", "/metrics", headers=key(ONE))).status == 200
        assert (await client.ask("GET", "/metrics", headers=LOCAL)).status == 401
        wire.server.set_access(HttpAccess(keys=keys))
        assert (await client.ask("GET", "/metrics", headers=key(ONE))).status == 403


# The documentation.


def alerts() -> list[str]:
    """The expressions of the table of what is worth an alert."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("## Worth an alert")[2].partition("\n## ")[0].replace(r"\|", "\0")
    rows = [line.split("|")[1].replace("\0", "|") for line in table.splitlines() if line.startswith("| `")]
    return [expression for row in rows for expression in re.findall(r"`([^`]+)`", row)]


def test_what_is_worth_an_alert_is_written_as_prometheus_reads_it(tmp_path: Path) -> None:
    assert len(alerts()) > 10
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    rules = [{"alert": f"alert{number}", "expr": expression} for number, expression in enumerate(alerts())]
    path = tmp_path / "rules.yml"  # JSON is YAML, too
    path.write_text(json.dumps({"groups": [{"name": "edgeqwen", "rules": rules}]}))
    check = subprocess.run(["promtool", "check", "rules", path], capture_output=True, timeout=60, check=False)
    assert check.returncode == 0, check.stdout + check.stderr


async def test_the_documentation_lists_what_is_told_and_nothing_else(tmp_path: Path) -> None:
    async with serve(tmp_path) as wire:
        text = await metrics(wire)
    told = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (gauge|counter|histogram) \|", page, re.MULTILINE)
    assert len(listed) == len(dict(listed)), "a metric is listed twice"
    assert dict(listed) == told
    mentioned = set(re.findall(r"\b(?:edgeqwen|process)_[a-z_]+", page))
    suffixes = ("_bucket", "_sum", "_count")
    assert {name for name in mentioned if not name.endswith(suffixes)} <= told.keys()
