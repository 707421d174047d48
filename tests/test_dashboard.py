"""The dashboard in docs/: of a form that Grafana takes, and every query of it answered by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemons import HANG_GUARD_S, DaemonProcess, run_command, running_daemon, script_of

ROOT: Final = Path(__file__).parent.parent
KEY: Final = "a-key-of-the-scraper"
OLDEST_SCHEMA: Final = 36
"""Of dashboards whose data source is an object, which all later versions of Grafana read."""

DASHBOARD: Final[dict[str, Any]] = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANELS: Final[list[dict[str, Any]]] = DASHBOARD["panels"]


def queries() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", ())]


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:edgeqwen|process)_\w+", query))


def sample_names(text: str) -> set[str]:
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in text.splitlines() if not line.startswith("#")}


# Its form.


def test_it_is_of_a_form_that_grafana_takes() -> None:
    assert DASHBOARD["schemaVersion"] >= OLDEST_SCHEMA
    assert "id" not in DASHBOARD, "an imported dashboard gets its id from Grafana"
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, f"{panel['title']} lies over another"
        taken |= cells


def test_every_query_asks_the_chosen_prometheus() -> None:
    (chosen,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]
    source = {"type": "prometheus", "uid": f"${{{chosen['name']}}}"}
    charts = [panel for panel in PANELS if panel["type"] != "row"]
    assert charts
    for panel in charts:
        assert panel["datasource"] == source
        assert panel["targets"], panel["title"]
        assert all(target["datasource"] == source for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


# What it asks.


@contextlib.contextmanager
def scraped_daemon(folder: Path) -> Iterator[DaemonProcess]:
    """A daemon on a TCP port whose metrics a key opens, that answers from a script, guesses and keeps to a cache."""
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    environ = {"EDGEQWEN_HTTP_API_KEY_FILE": str(keys), "EDGEQWEN_HTTP_METRICS": "all"}
    with running_daemon(script_of("abcabcabcabcabc"), "--http", "127.0.0.1:0", environ=environ) as daemon:
        daemon.wait_until_ready()
        yield daemon


def work(daemon: DaemonProcess) -> None:
    """Something of everything that is measured."""
    with daemon.client() as client:
        client.chat("hello " * 40)
        client.embed(["a text"])


def test_every_metric_that_it_asks_for_is_told(tmp_path: Path) -> None:
    with scraped_daemon(tmp_path) as daemon:
        work(daemon)
        told = run_command("metrics", "--socket", str(daemon.socket_path))
        assert told.returncode == 0
        url = f"http://127.0.0.1:{daemon.http_port}/metrics"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:
            over_tcp = answer.read().decode()
    known = sample_names(told.stdout.decode())
    assert sample_names(over_tcp) == known
    asked = set().union(*map(names_in, queries()))
    assert len(asked) > 20
    assert asked <= known


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_prometheus_that_scrapes_the_daemon_answers_every_query(tmp_path: Path) -> None:
    with scraped_daemon(tmp_path) as daemon, running_prometheus(tmp_path, daemon.http_port) as port:
        unanswered = {query: filled_in(query) for query in queries()}
        assert len(unanswered) > 30
        give_up_at = time.monotonic() + HANG_GUARD_S
        while unanswered:
            work(daemon)
            unanswered = {query: filled for query, filled in unanswered.items() if not ask(port, filled)}
            assert time.monotonic() < give_up_at, list(unanswered)


def filled_in(query: str) -> str:
    """With values in the place of Grafana's variables, as Grafana does it."""
    query = query.replace("$__rate_interval", "5s").replace("$instance", ".*")
    assert "$" not in query
    return query


def ask(port: int, query: str) -> list[Any]:
    """The samples of an instant query. An error of the query is an HTTP error."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=HANG_GUARD_S) as answer:
        result = json.load(answer)
    assert result["status"] == "success"
    samples: list[Any] = result["data"]["result"]
    return samples


@contextlib.contextmanager
def running_prometheus(folder: Path, target_port: int) -> Iterator[int]:
    """A Prometheus with the scrape configuration of docs/metrics.md, only faster; its port."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (folder / "scraper.key").write_text(KEY)
    for before, after in (
        ("/etc/prometheus/edgeqwen.key", str(folder / "scraper.key")),
        ("127.0.0.1:8080", f"127.0.0.1:{target_port}"),
        ("15s", "250ms"),
    ):
        assert before in config
        config = config.replace(before, after)
    (folder / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    log_path = folder / "prometheus.log"
    with log_path.open("wb") as log:
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        give_up_at = time.monotonic() + HANG_GUARD_S
        while not is_ready(port):
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < give_up_at, log_path.read_text()
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait(HANG_GUARD_S)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=HANG_GUARD_S):
            return True
    except OSError:
        return False
