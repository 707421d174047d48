"""The log: events with fields, where they go, and what never stands in them."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeqwen.engine.outcomes import Outcome, Refusal
from edgeqwen.errors import RuntimeFailed
from edgeqwen.logs import Event
from edgeqwen.logs import output as output_module
from edgeqwen.logs.event import describe_error, one_line
from edgeqwen.logs.journal import MOST_VALUE_BYTES, JournalHandler, encode_entry, entry_of, is_connected_to_journal
from edgeqwen.logs.output import JsonFormatter, TextFormatter, make_handler
from edgeqwen.request_log import MOST_OWNERS, MOST_REFUSALS, WINDOW_S, RequestLog
from tests.daemons import running_daemon, script_of

HOSTILE = "a\n<3>edgeqwen ERROR forged key=1\x1b[31m\u2028b"


def record(message: object, level: int = logging.INFO, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("edgeqwen.test", level, __file__, 1, message, None, info)


def parsed(datagram: bytes) -> dict[str, bytes]:
    """The fields of an entry, as the journal reads them."""
    fields: dict[str, bytes] = {}
    while datagram:
        line, _, rest = datagram.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            length = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + length], rest[8 + length :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[name.decode()] = value
        datagram = rest
    return fields


# Events.


def test_an_event_reads_as_its_name_and_its_fields() -> None:
    event = Event("ready", model="a b", load_s=1.25, context=8192, note=None)
    assert str(event) == 'ready model="a b" load_s=1.25 context=8192'
    assert event.fields == {"model": "a b", "load_s": 1.25, "context": 8192}


def test_the_id_of_an_event_is_for_ever() -> None:
    assert Event("ready").message_id == Event("ready", model="x").message_id == READY_ID
    assert Event("stopped").message_id != READY_ID


READY_ID = "648a5166e7335e4a8a5ae8fc40554ffd"


@given(st.text())
def test_what_is_logged_is_one_line(text: str) -> None:
    for line in (one_line(text), str(Event("x", field=text))):
        assert len(line.splitlines()) <= 1
        assert not re.search("[\x00-\x1f\x7f-\x9f]", line)


def test_of_an_error_its_place_is_told_and_what_it_says_only_if_that_is_ours() -> None:
    secret = "what somebody asked"
    for error, is_quoted in ((ValueError(secret), False), (KeyError(secret), False), (RuntimeFailed("step 3"), True)):
        try:
            raise error
        except type(error):
            text = describe_error(sys.exc_info())
        assert Path(__file__).name in text
        assert type(error).__name__ in text
        assert secret not in text
        assert (str(error) in text) == is_quoted
    with pytest.raises(OSError) as caught:
        os.stat("/no/such/file")
    assert "No such file" in describe_error((caught.type, caught.value, caught.tb))
    assert describe_error((None, None, None)) == ""


# The journal.


@given(st.dictionaries(st.from_regex(r"[A-Z][A-Z_]{0,9}", fullmatch=True), st.text(max_size=50), max_size=8))
def test_the_journal_reads_what_was_written(fields: dict[str, str]) -> None:
    expected = {name: value.encode("utf-8", "backslashreplace") for name, value in fields.items()}
    assert parsed(encode_entry(fields)) == expected


def test_a_long_value_is_cut() -> None:
    assert len(parsed(encode_entry({"MESSAGE": "x" * 10**6}))["MESSAGE"]) == MOST_VALUE_BYTES


def test_an_entry_has_the_fields_that_are_promised() -> None:
    entry = entry_of(record(Event("request", rid="r1", uid="1000", ttft_us=5, tokens=7, name=HOSTILE)))
    assert entry["PRIORITY"] == "6"
    assert entry["SYSLOG_IDENTIFIER"] == "edgeqwen"
    assert entry["MESSAGE_ID"] == Event("request").message_id
    assert {name: entry[f"EDGEQWEN_{name}"] for name in ("EVENT", "RID", "UID", "TTFT_US", "TOKENS")} == {
        "EVENT": "request",
        "RID": "r1",
        "UID": "1000",
        "TTFT_US": "5",
        "TOKENS": "7",
    }
    fields = parsed(encode_entry(entry))
    assert fields["EDGEQWEN_NAME"] == HOSTILE.encode()
    assert b"\n" not in fields["MESSAGE"]


def test_entries_go_to_the_journal_and_outlast_its_restart(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    assert JournalHandler.open(path) is None, "nobody is there"
    handler = None
    for number in range(2):
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
            journal.settimeout(5)
            journal.bind(str(path))
            handler = handler or JournalHandler.open(path)
            assert handler is not None
            handler.emit(record(Event("ready", number=number)))
            assert parsed(journal.recv(65_536))["EDGEQWEN_NUMBER"] == str(number).encode()
        handler.emit(record(Event("ready")))  # the journal is away: nothing happens
    assert handler is not None
    handler.close()


def test_the_journal_is_spoken_to_only_where_our_output_leads_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w") as stream, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        status = os.fstat(stream.fileno())
        ours, others = f"{status.st_dev}:{status.st_ino}", f"{status.st_dev}:{status.st_ino + 1}"
        assert is_connected_to_journal(ours, stream)
        assert not any(is_connected_to_journal(text, stream) for text in (others, "", "x", "1:2:3"))
        assert not is_connected_to_journal(ours, io.StringIO())
        journal.bind(str(tmp_path / "socket"))
        monkeypatch.setattr(output_module, "JOURNAL_SOCKET", tmp_path / "socket")
        handler = make_handler("auto", stream, {"JOURNAL_STREAM": ours})
        assert isinstance(handler, JournalHandler)
        handler.close()
        for environ in ({}, {"JOURNAL_STREAM": others}):
            assert not isinstance(make_handler("auto", stream, environ), JournalHandler)
        assert not isinstance(make_handler("text", stream, {"JOURNAL_STREAM": ours}), JournalHandler)


def test_without_its_socket_the_journal_gets_lines_with_priorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "JOURNAL_SOCKET", tmp_path / "nothing")
    with (tmp_path / "out").open("w") as stream:
        status = os.fstat(stream.fileno())
        handler = make_handler("auto", stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
        assert handler.format(record(Event("ready"))) == "<6>edgeqwen INFO ready"
        assert handler.format(record("amiss", logging.WARNING)) == "<4>edgeqwen WARNING amiss"


# Lines.


def test_a_line_for_a_file_has_its_time_and_nothing_in_it_forges_another() -> None:
    line = TextFormatter().format(record(Event("ready", model=HOSTILE)))
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z edgeqwen INFO ready model=", line)
    assert "\n" not in line
    assert "\x1b" not in line


def test_on_a_terminal_only_what_is_amiss_is_coloured() -> None:
    plain, coloured = TextFormatter(is_terminal=True), TextFormatter(is_terminal=True, is_coloured=True)
    assert re.fullmatch(r"\d\d:\d\d:\d\d ready", plain.format(record(Event("ready"))))
    assert "\x1b" not in coloured.format(record(Event("ready")))
    assert coloured.format(record("amiss", logging.ERROR)).startswith("\x1b[31m")
    assert plain.format(record("amiss", logging.ERROR)).endswith("error: amiss")


def test_json_has_the_fields_as_members() -> None:
    members = json.loads(JsonFormatter().format(record(Event("request", tokens=7), error=ValueError("secret"))))
    assert (members["event"], members["tokens"], members["level"]) == ("request", 7, "info")
    assert members["error"] == "Traceback:\nbuiltins.ValueError"


# Requests.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "edgeqwen.request_log"):
        yield caplog


def events_of(told: pytest.LogCaptureFixture) -> list[Event]:
    return [entry.msg for entry in told.records if isinstance(entry.msg, Event)]


def test_each_request_is_a_line(told: pytest.LogCaptureFixture) -> None:
    RequestLog(clock=Clock()).note_outcome(
        Outcome(
            rid="r1",
            owner="key:" + "f" * 64,
            kind="generation",
            outcome="stop",
            queue_s=0.5,
            first_token_s=0.75,
            total_s=2.0,
            num_prompt=10,
            num_cached=4,
            num_generated=3,
        )
    )
    (event,) = events_of(told)
    assert str(event) == (
        f"request rid=r1 uid=key:{'f' * 12} op=generation code=stop queue_us=500000 ttft_us=750000 total_us=2000000 "
        "prompt=10 cached=4 tokens=3"
    )


def test_refusals_are_told_up_to_a_number_a_minute_and_what_was_left_out_later(
    told: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    requests = RequestLog(clock=clock)
    for _ in range(MOST_REFUSALS + 25):
        requests.note_refusal(Refusal("1000", "generation", "busy"))
    requests.note_refusal(Refusal("1001", "generation", "busy"))
    assert len(events_of(told)) == MOST_REFUSALS + 1
    clock.now += WINDOW_S
    requests.note_refusal(Refusal("1000", "embedding", "quota"))
    assert str(events_of(told)[-1]) == "refused uid=1000 op=embedding code=quota left_out=25"


def test_only_so_many_owners_are_remembered() -> None:
    requests = RequestLog(clock=Clock())
    for number in range(MOST_OWNERS + 50):
        requests.note_refusal(Refusal(str(number), "generation", "busy"))
    assert len(requests._windows) == MOST_OWNERS


CANARY = "Kanarienvogel7"


def test_nothing_that_is_said_stands_in_the_log(tmp_path: Path) -> None:
    bad = [
        f'{{"op":"chat","prompt":"{CANARY}","temprature":1}}',
        f'{{"op":"{CANARY}"}}',
        f'{{"op":"chat","messages":[{{"role":"{CANARY}","content":"x"}}]}}',
        f'{{"op":"chat","prompt":"x","response_format":{{"type":"regex","regex":"({CANARY}"}}}}',
        f'{{"op":"chat","prompt":"x","tools":"{CANARY}"}}',
        f'{{"op":"session.create","name":"{CANARY}","{CANARY}":1}}',
        f'["{CANARY}"]',
        f'{{"op":"chat","prompt":"{CANARY}',
    ]
    with running_daemon(script_of(CANARY, CANARY), "--http", "127.0.0.1:0") as daemon:
        with daemon.client() as client:
            session = client.session_create(CANARY)
            assert (
                CANARY in client.chat([{"role": "system", "content": CANARY}, {"role": "user", "content": "hi"}]).text
            )
            client.chat(CANARY, session=session)
            client.tokenize(CANARY)
        for line in bad:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20)
                sock.connect(str(daemon.socket_path))
                sock.sendall(line.encode() + b"\n")
                sock.shutdown(socket.SHUT_WR)
                with sock.makefile("rb") as answer:
                    assert b"error" in answer.read()
                status = post(daemon.http_port, line)
                assert status >= 400
        daemon.process.terminate()
        assert daemon.wait() == 0
        log = daemon.log
    assert " request rid=" in log
    assert " refused uid=" in log
    assert CANARY not in log


def post(port: int, body: str) -> int:
    """The status of a chat completion that is asked for with this body."""

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/chat/completions", body.encode(), {"Content-Type": "application/json"})
    try:
        return connection.getresponse().status
    finally:
        connection.close()
