"""The long runs of `scripts/soak`, in short: the same programs, a scripted model, and the real one where it is there.

The scripted model's next token is a function of all tokens before it, so an answer over another's cache is another one.
"""

from __future__ import annotations

import random
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import needs_row_invariance, smollm2_package
from tests.soak import aborts, crowd, day, fuzz, kill9, memory, mixed
from tests.soak.fuzz_answers import check_lines, read_responses
from tests.soak.line import Ended, Line
from tests.soak.service import Model, Service, package_model, scripted_model
from tests.soak.weather import small_disk


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Slow enough that requests meet."""
    return scripted_model(tmp_path / "model", step_s=0.001)


def test_crowd_reads_what_each_would_have_read_alone(model: Model, tmp_path: Path) -> None:
    found = crowd.run(tmp_path, model, crowd.Size(num_clients=16, num_turns=3, num_words=40, max_tokens=12))
    assert found["evicted"] > 0
    assert found["cached"] > 0
    assert found["queued"] > 0


def test_crowd_of_a_real_model_reads_what_each_would_have_read_alone(tmp_path: Path) -> None:
    needs_row_invariance()
    model = package_model(smollm2_package("int8"), "fp32")
    found = crowd.run(tmp_path, model, crowd.Size(num_clients=4, num_turns=2, num_words=20, max_tokens=8))
    assert found["running"] > 1


def test_daemon_that_is_killed_comes_back_with_every_finished_turn(model: Model, tmp_path: Path) -> None:
    found = kill9.run(tmp_path, model, kill9.Size(num_rounds=4, num_words=20, max_tokens=8, most_s=1.0))
    assert found["turns"] > 4
    assert found["files"].get(".session", 0) > 0


def test_mixed_requests_leave_nothing_behind(model: Model, tmp_path: Path) -> None:
    # The scripted runtime remembers every step that it was given, so memory is for the long form to look at.
    size = mixed.Size(num_requests=160, num_before=60, num_words=10, max_tokens=8, most_growth=1.0, quiet_s=0.5)
    found = mixed.run(tmp_path, model, size)
    assert len(found["requests"]) > 10


def test_a_day_in_short_loses_nothing(model: Model, tmp_path: Path) -> None:
    # What is left of so few requests says nothing of leaks: memory is for the long form to look at.
    size = day.Size(
        num_requests=120,
        num_hours=3,
        num_clients=3,
        num_keepers=2,
        num_words=10,
        max_tokens=8,
        disk_mb=-1 if may_mount(tmp_path) else 0,
        pressure_mb=64,
        reload_s=0.2,
        idle_unload_s=0.2,
        quiet_s=0.1,
    )
    found = day.run(tmp_path / "day", model, size)
    assert found["reloads"][0] >= size.num_hours
    assert len(found["asleep_mb"]) == size.num_hours
    assert (found["turns_that_could_not_be_saved"] > 0) == (size.disk_mb != 0)


def may_mount(folder: Path) -> bool:
    """Whether a small disk is to be had, which one has to be root for."""
    try:
        with small_disk(folder / "probe", 1):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


def test_clients_that_hang_up_do_not_change_what_others_are_told(model: Model, tmp_path: Path) -> None:
    size = aborts.Size(num_clients=8, num_prompts=3, num_tokens=600, max_tokens=12, minutes=0.05)
    found = aborts.run(tmp_path, model, size)
    assert found["answered"] > 8


def test_whatever_is_sent_the_daemon_stays_well_and_each_request_has_one_end(tmp_path: Path) -> None:
    # As much memory as the first requests take is for the long form to tell from a leak.
    size = fuzz.Size(
        num_requests=600, num_splits=20_000, num_socket_splits=2000, num_parts=4, most_growth=1.0, most_slope=1e9
    )
    found = fuzz.run(tmp_path, size)
    assert found["splits"] == 20_000
    assert min(found["answers"][kind] for kind in ("well", "bad_json", "bad_request", "http 200", "http 400")) > 0


# That the runs would see what they look for.


def test_crowd_sees_an_answer_of_another(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = crowd.Client.talk

    def mixed_up(client: crowd.Client, line: Line, size: crowd.Size) -> list[str]:
        first, *rest = talk(client, line, size)
        return [first, *reversed(rest)]

    monkeypatch.setattr(crowd.Client, "talk", mixed_up)
    with pytest.raises(AssertionError, match="turn 2"):
        crowd.run(tmp_path, model, crowd.Size(num_clients=2, num_turns=3, num_words=8, max_tokens=8))


def test_talker_sees_a_turn_that_is_lost_or_that_nobody_asked_for(model: Model, tmp_path: Path) -> None:
    with Service(tmp_path / "daemon", model) as service, service.line() as line:
        talker = kill9.Talker(1, random.Random(1), kill9.Size())
        talker.turn(line)
        talker.check(line)
        line.must("chat", session=talker.session, prompt="more", max_tokens=4)
        with pytest.raises(AssertionError, match="more"):
            talker.check(line)
        line.must("session.reset", session=talker.session)
        with pytest.raises(AssertionError, match="not "):
            talker.check(line)


def test_line_sees_a_second_last_frame(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with Line(tmp_path / "s") as line:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b'{"id":1,"done":true}\n\n{"id":1,"done":true}\n')
                line.ask("stats")
                with pytest.raises(AssertionError, match="a frame of 1 while 2"):
                    line.check_silence()
            with pytest.raises(Ended):
                line.read()


@given(
    passing=st.lists(st.integers(0, 10_000_000), min_size=20, max_size=20).filter(lambda looks: looks[10] == 0),
    leak_bytes=st.integers(0, 1000),
)
def test_a_leak_is_seen_beneath_what_comes_and_goes(passing: list[int], leak_bytes: int) -> None:
    looks = [100_000_000 + each + 5000 * leak_bytes * number for number, each in enumerate(passing)]
    assert memory.slope(looks, 5000) >= leak_bytes - 1e-6


def test_what_comes_and_goes_is_no_leak() -> None:
    assert memory.slope([10, 20, 50, 70, 90, 70, 95, 70], 1) == 0


def test_growth_is_that_of_the_second_half() -> None:
    assert memory.growth([50, 100, 150, 110]) == pytest.approx(0.1)


SENT = b'{"op":"health","id":1}\n{"op":"health"}\n'
ANSWERED = b'{"id":1,"done":true,"ok":true}\n{"done":true,"ok":true}\n'


@pytest.mark.parametrize(
    "got",
    [
        ANSWERED.replace(b'"id":1', b'"id":2'),
        ANSWERED + b'{"id":1,"done":true}\n',
        ANSWERED[: -len(b'{"done":true,"ok":true}\n')],
        ANSWERED[:-1],
        ANSWERED + b'{"id":1,"done":false}\n',
        b'{"id":1,"done":true,"error":{"code":"engine","message":""}}\n{"done":true}\n',
        b'{"done":true,"error":{"code":"bad_json","message":"line 1 is not"}}\n' + ANSWERED,
    ],
)
def test_fuzzing_sees_a_frame_too_many_too_few_or_of_nobody(got: bytes) -> None:
    check_lines(SENT, ANSWERED)
    with pytest.raises(AssertionError):
        check_lines(SENT, got)


@pytest.mark.parametrize(
    "got",
    [
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Len",
    ],
)
def test_fuzzing_sees_a_response_that_failed_or_is_torn(got: bytes) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    assert [response.body for response in read_responses(whole * 2)] == [b"{}"] * 2
    with pytest.raises(AssertionError):
        read_responses(whole + got)
