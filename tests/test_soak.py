"""The long runs of `scripts/soak`, in short: the same programs, a scripted model, and the real one where it is there.

The scripted model's next token is a function of all tokens before it, so an answer over another's cache is another one.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from tests.models import needs_row_invariance, smollm2_package
from tests.soak import aborts, crowd, kill9, mixed
from tests.soak.line import Ended, Line
from tests.soak.service import Model, Service, package_model, scripted_model


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


def test_clients_that_hang_up_do_not_change_what_others_are_told(model: Model, tmp_path: Path) -> None:
    size = aborts.Size(num_clients=8, num_prompts=3, num_tokens=600, max_tokens=12, minutes=0.05)
    found = aborts.run(tmp_path, model, size)
    assert found["answered"] > 8


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
