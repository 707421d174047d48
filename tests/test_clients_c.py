"""The C header: strings and members of JSON against Python's, what a program can ask of it, and a server gone mad.

All of it runs with the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import json
import random
import select
import socket
import subprocess
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.client_programs import CFLAGS, CLIENTS, ENDLESS, SANITIZERS, build_c, build_folder, run_tool, tool
from tests.daemons import HANG_GUARD_S, running_daemon, script_of
from tests.scripted_socket import FINAL, START, line, said, scripted_socket

READER = """
#define EDGEQWEN_IMPLEMENTATION
#include "edgeqwen.h"
#include <stdio.h>

/* Of each line of stdin: NAME TAB JSON. The member as it stands, then its text with room for argv[1] bytes, both as
 * lines. Every value is in an allocation of its own size, for the sanitizer. */
int main(int argc, char **argv) {
    static char data[1 << 20];
    size_t room = argc > 1 ? (size_t)atoi(argv[1]) : 0;
    while (fgets(data, sizeof data, stdin) != NULL) {
        char *tab = strchr(data, '\\t'), *copy, *text;
        size_t length, num_bytes, i;
        const char *value;
        data[strcspn(data, "\\n")] = *tab = '\\0';
        length = strlen(tab + 1);
        copy = malloc(length ? length : 1);
        memcpy(copy, tab + 1, length);
        value = eq_find(copy, length, data, &num_bytes);
        printf("%.*s\\n", (int)num_bytes, value ? value : "");
        text = malloc(room ? room : 1);
        length = value ? eq_unescape(value, num_bytes, text, room) : 0;
        for (i = 0; i < length; i++) printf("%02x", (unsigned char)text[i]);
        putchar('\\n');
        free(text);
        free(copy);
    }
    return 0;
}
"""

ASKER = """
#define EDGEQWEN_IMPLEMENTATION
#include "edgeqwen.h"
#include <signal.h>
#include <stdio.h>

static eq_reply reply;
static unsigned long sum;

static int count(void *user, enum eq_kind kind, const char *data, size_t num_bytes) {
    size_t i;
    for (i = 0; i < num_bytes; i++) sum = sum * 31 + (unsigned char)data[i];
    if (data[num_bytes] != '\\0') abort();
    ((unsigned long *)user)[kind] += num_bytes;
    return 0;
}

/* ask SOCKET TIMES: asks so often and tells how each ended, and how many bytes there were of each kind. */
int main(int argc, char **argv) {
    eq_request request = {0};
    int left, by_json;
    request.socket_path = argv[1];
    request.prompt = "x";
    request.timeout_ms = 20000;
    if (argc < 3) return 64;
    for (left = atoi(argv[2]); left > 0; left--) {
        unsigned long num_bytes[4] = {0};
        by_json = argc > 3;
        if (by_json) eq_json(&reply, argv[1], 20000, "{\\"op\\":\\"chat\\"}", count, num_bytes);
        else eq_chat(&reply, &request, count, num_bytes);
        if (reply.final_frame && strlen(reply.final_frame) > reply.final_bytes) abort();
        printf("%d %s %lu %lu %lu %lu\\n", reply.exit_code, reply.code[0] ? "error" : "-", num_bytes[EQ_TEXT],
               num_bytes[EQ_REASONING], num_bytes[EQ_TOOL_CALLS], num_bytes[EQ_FRAME]);
    }
    return (int)(sum & 0);
}
"""


def member(name: str, *objects: str, room: int = 1 << 20) -> list[tuple[str, bytes]]:
    """What the header finds: the value as it stands and its text."""
    program = build_c(READER, "reader", *SANITIZERS)
    result = run_tool(str(program), str(room), input="".join(f"{name}\t{each}\n" for each in objects).encode())
    assert result.returncode == 0, result.stderr.decode()
    values = result.stdout.decode().split("\n")
    return [(raw, bytes.fromhex(text)) for raw, text in zip(values[:-1:2], values[1::2], strict=True)]


def replaced(text: str) -> bytes:
    """Halves of surrogate pairs as replacement characters, pairs joined."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


ANY_TEXT = st.text(st.characters(), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)
# Every example is a process: few of them, and none more to find the shortest that fails.
few_processes = settings(
    max_examples=30,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@few_processes
@given(st.lists(ANY_TEXT, min_size=1, max_size=40), st.booleans())
@example(["\ud83d", "\ud83d\ud83d\ude00", "\ude00\ud83d", "a\ud83db", "\x00\x00"], True)
def test_strings_are_what_python_makes_of_them(texts: list[str], is_ascii: bool) -> None:
    if not is_ascii:
        texts = [replaced(text).decode() for text in texts]
    objects = [json.dumps({"t": text}, ensure_ascii=is_ascii) for text in texts]
    assert [text for _, text in member("t", *objects)] == [replaced(text) for text in texts]


@few_processes
@given(st.lists(ANY_TEXT.map(replaced), min_size=1, max_size=20), st.integers(0, 30))
def test_string_without_room_is_cut_between_characters(texts: list[bytes], room: int) -> None:
    objects = [json.dumps({"t": text.decode()}) for text in texts]
    for text, (_, got) in zip(texts, member("t", *objects, room=room), strict=True):
        assert len(got) < max(room, 1)
        assert text.startswith(got)
        got.decode()
        rest = text[len(got) :].decode()
        assert not rest or room == 0 or len(got) + len(rest[0].encode()) >= room


@few_processes
@given(st.lists(st.tuples(JSON, JSON, JSON), min_size=1, max_size=20), st.sampled_from([None, (", ", " : ")]))
def test_a_member_is_found_whatever_stands_around_it(
    values: list[tuple[Any, Any, Any]], separators: tuple[str, str] | None
) -> None:
    form = separators or (",", ":")
    objects = [
        json.dumps({"a": before, "nested": {"want": 0}, "want": wanted, "z": after}, separators=form)
        for before, wanted, after in values
    ]
    found = [raw for raw, _ in member("want", *objects)]
    assert found == [json.dumps(wanted, separators=form) for _, wanted, _ in values]


@few_processes
@given(st.data())
def test_what_is_no_json_is_read_within_its_bounds(data: st.DataObject) -> None:
    """Cut and changed anywhere: the sanitizer is the judge."""
    whole = json.dumps({"a": [1, 'x\\"\ud83d\ude00'], "want": "v\u0007", "b": {"want": None}})
    broken = []
    for _ in range(40):
        at = data.draw(st.integers(0, len(whole)))
        broken.append(whole[:at] + data.draw(st.sampled_from(["", '"', "\\", "{", "}", "\\u", "\\ud8", ",", ":", "é"])))
        broken.append(broken[-1] + whole[data.draw(st.integers(at, len(whole))) :])
    assert len(member("want", *broken)) == len(broken)


def asked(path: Any, times: int, *more: str) -> list[tuple[int, list[int]]]:
    """Exit codes, and bytes of text, thought, calls and frames."""
    program = build_c(ASKER, "asker", *SANITIZERS)
    result = run_tool(str(program), str(path), str(times), *more, timeout=300)
    assert result.returncode == 0, result.stderr.decode()
    rows = [row.split() for row in result.stdout.decode().splitlines()]
    assert all((row[0] != "0") == (row[1] == "error") for row in rows)
    return [(int(row[0]), [int(number) for number in row[2:]]) for row in rows]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("more", [(), ("json",)], ids=["chat", "raw"])
def test_a_server_gone_mad_does_no_harm(seed: int, more: tuple[str, ...]) -> None:
    choice = random.Random(seed)
    good = said("a" * 30_000, 'x "done":true \n' * 900, "\x01" * 5000, "é😀") + b"\n"
    calls = line(START, {"done": False, "tool_calls": [{"id": "c", "name": "f", "arguments": '{"done":true}'}]}, FINAL)

    def mad(connection: socket.socket) -> None:
        reply = mutated(choice.choice((good, calls)), choice)
        while reply:
            size = choice.choice((1, 7, 100, 32 << 10, 1 << 20))
            sent = reply[:size] if len(reply) < 2000 else reply[: max(size, 500)]
            connection.sendall(sent)
            reply = reply[len(sent) :]

    times = 150
    with scripted_socket(mad) as server:
        results = asked(server.path, times, *more)
    exit_codes = {exit_code for exit_code, _ in results}
    assert len(results) == times
    assert exit_codes <= {0, 64, 65, 69, 70, 74, 75, 77}
    assert {0, 74} <= exit_codes


def mutated(data: bytes, choice: random.Random) -> bytes:
    """Cut, doubled, overwritten, without line ends, or as it was."""
    changed = bytearray(data)
    for _ in range(choice.randrange(4)):
        at = choice.randrange(len(changed) + 1)
        match choice.randrange(6):
            case 0:
                del changed[at:]
            case 1:
                changed[at:at] = bytes(choice.randrange(256) for _ in range(choice.randrange(1, 9)))
            case 2:
                changed[at:at] = choice.choice((
                    b"\n",
                    b"\\",
                    b'"',
                    b"}",
                    b"{",
                    b"\\u",
                    b"\\ud83d",
                    b'"done":true',
                    b"\0",
                ))
            case 3:
                del changed[at : at + choice.randrange(1, 9)]
            case 4:
                changed[at:at] = b"[" * choice.randrange(1, 50_000)
            case _:
                changed = bytearray(bytes(changed).replace(b"\n", b"", choice.randrange(1, 4)))
    return bytes(changed)


def test_frames_in_single_bytes_are_whole() -> None:
    with scripted_socket(said('"done":true', "\n" * 100), chunk_bytes=1) as server:
        assert asked(server.path, 20) == [(0, [111, 0, 0, 0])] * 20


def run_main(
    body: str, name: str, *arguments: str, flags: tuple[str, ...] = SANITIZERS
) -> subprocess.CompletedProcess[bytes]:
    source = (
        '#define EDGEQWEN_IMPLEMENTATION\n#include "edgeqwen.h"\n#include <stdio.h>\nstatic eq_reply reply;\n' + body
    )
    return run_tool(str(build_c(source, name, *flags)), *arguments)


def test_calls_of_tools_are_given_as_they_came_and_the_final_frame_is_kept() -> None:
    body = """
    static int show(void *user, enum eq_kind kind, const char *data, size_t num_bytes) {
        (void)user;
        printf("%d %.*s\\n", (int)kind, (int)num_bytes, data);
        return 0;
    }
    int main(int argc, char **argv) {
        eq_request request = {0};
        size_t usage_bytes, num_bytes;
        const char *usage, *completion;
        (void)argc;
        request.socket_path = argv[1];
        request.system = "Be \\"brief\\".";
        request.prompt = "tab\\there";
        request.session = "@notes";
        request.members = "\\"tools\\":[],\\"max_tokens\\":9";
        eq_chat(&reply, &request, show, NULL);
        usage = eq_find(reply.final_frame, reply.final_bytes, "usage", &usage_bytes);
        completion = eq_find(usage, usage_bytes, "completion", &num_bytes);
        printf("%s %.*s %ld\\n%s\\n", reply.finish, (int)num_bytes, completion, reply.retry_ms, reply.final_frame);
        return reply.exit_code;
    }
    """
    first = {"done": False, "tool_calls": [{"id": "c1", "name": "f", "arguments": '{"a":'}]}
    final = {
        "done": True,
        "tool_calls": [{"id": "c2", "name": "g", "arguments": "{}"}],
        **FINAL,
        "finish": "tool_calls",
    }
    with scripted_socket(line(START, first, {"done": False, "delta": "x"}, final)) as server:
        result = run_main(body, "calls", str(server.path))
        request = server.request()
    assert (result.returncode, result.stderr) == (0, b"")
    lines = result.stdout.decode().splitlines()
    compact = (",", ":")
    assert lines[0] == "2 " + json.dumps(first["tool_calls"], separators=compact)
    assert lines[1] == "0 x"
    assert lines[2] == "2 " + json.dumps(final["tool_calls"], separators=compact)
    assert lines[3] == "tool_calls 1 -1"
    assert json.loads(lines[4]) == final
    system, user = (
        {"role": role, "content": text} for role, text in (("system", 'Be "brief".'), ("user", "tab\there"))
    )
    members = {"session": "@notes", "messages": [system, user], "tools": [], "max_tokens": 9}
    assert request == {"op": "chat", "stream": True, **members}


def test_error_has_code_field_and_time_to_retry() -> None:
    body = """
    int main(int argc, char **argv) {
        (void)argc;
        eq_json(&reply, argv[1], 0, "{\\"op\\":\\"x\\"}", NULL, NULL);
        printf("%s|%s|%s|%ld", reply.code, reply.field, reply.message, reply.retry_ms);
        return reply.exit_code;
    }
    """
    long_text = "é" * 400
    error = {"code": "quota", "message": long_text, "field": "f\n", "retry_ms": 2000}
    with scripted_socket(line({"id": 3, "done": True, "error": error})) as server:
        result = run_main(body, "error", str(server.path))
    assert result.returncode == 75
    assert result.stdout.decode() == f"quota|f\n|{'é' * 127}|2000"


SILENT = """
    #include <signal.h>
    #include <sys/time.h>
    static int num_signals;
    static void count(int number) { (void)number; num_signals++; }
    int main(int argc, char **argv) {
        eq_request request = {0};
        struct sigaction action;
        struct itimerval often = {{0, 20000}, {0, 20000}};
        (void)argc;
        memset(&action, 0, sizeof action);
        action.sa_handler = count; /* without SA_RESTART: every call that waits is interrupted */
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &often, NULL);
        request.socket_path = argv[1];
        request.prompt = "x";
        request.timeout_ms = atoi(argv[2]);
        eq_chat(&reply, &request, NULL, NULL);
        printf("%s %d", reply.code, num_signals > 0);
        return reply.exit_code;
    }
"""
SIGNALS = (*SANITIZERS, "-D_XOPEN_SOURCE=700", "-D_POSIX_C_SOURCE=200809L")


def test_silence_ends_the_wait_though_signals_come() -> None:
    def silent(connection: socket.socket) -> None:
        connection.sendall(line(START))
        hangup = select.poll()
        hangup.register(connection, 0)  # POLLHUP is always reported: the client is gone altogether
        assert hangup.poll(1000 * HANG_GUARD_S)

    with scripted_socket(silent) as server:
        result = run_main(SILENT, "silent", str(server.path), "300", flags=SIGNALS)
    assert (result.returncode, result.stdout) == (74, b"silent 1")


def test_signals_and_a_slow_daemon_are_borne() -> None:
    """Blank lines keep the wait alive though the answer takes longer than the longest silence."""
    with running_daemon(script_of("!", step_s=2.0)) as daemon:
        result = run_main(SILENT, "silent", str(daemon.socket_path), "1200", flags=SIGNALS)
    assert (result.returncode, result.stdout) == (0, b" 1")


def test_daemon_whose_queue_of_connections_is_full_is_asked_again(tmp_path: Any) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        result = run_main(SILENT, "silent", str(path), "100", flags=SIGNALS)
    assert (result.returncode, result.stdout.split()[0]) == (69, b"no_daemon")


def test_callback_that_stops_hangs_up() -> None:
    body = """
    static int stop(void *user, enum eq_kind kind, const char *data, size_t num_bytes) {
        (void)user, (void)data, (void)num_bytes;
        return kind == EQ_TEXT;
    }
    int main(int argc, char **argv) {
        eq_request request = {0};
        (void)argc;
        request.socket_path = argv[1];
        request.prompt = "x";
        printf("%d ", eq_chat(&reply, &request, stop, NULL));
        printf("%s", reply.code);
        return 0;
    }
    """
    with running_daemon(ENDLESS) as daemon:
        result = run_main(body, "stop", str(daemon.socket_path))
        daemon.wait_for(running=0, queued=0)
    assert (result.returncode, result.stdout) == (0, b"130 stopped")


@pytest.mark.parametrize(
    "flags", [(), ("-O2",), ("-O3", "-Wconversion", "-Wshadow", "-Wcast-align", "-Wwrite-strings")]
)
def test_example_compiles_without_a_warning(flags: tuple[str, ...]) -> None:
    build_c((CLIENTS / "ask.c").read_text(), "ask-" + "".join(flags).replace("-", ""), *flags)


def test_example_is_short_and_allocates_nothing() -> None:
    assert len((CLIENTS / "ask.c").read_text().splitlines()) <= 60
    program = build_c((CLIENTS / "ask.c").read_text(), "ask-plain", "-O2")
    symbols = run_tool(tool("nm"), "-u", str(program)).stdout.decode()
    assert "poll" in symbols
    assert not {"malloc", "calloc", "realloc", "alloca"} & {name.split("@")[0] for name in symbols.split()}


def test_header_serves_several_files_and_c_plus_plus() -> None:
    compiler = tool("cc")
    folder = build_folder()
    (folder / "one.c").write_text('#define EDGEQWEN_IMPLEMENTATION\n#include "edgeqwen.h"\n#include "edgeqwen.h"\n')
    (folder / "two.c").write_text(
        '#include <stdio.h>\n#include "edgeqwen.h"\n'
        'int main(void) { size_t n; return eq_find("{}", 2, "a", &n) != NULL; }\n'
    )
    sources = [str(folder / name) for name in ("one.c", "two.c")]
    built = run_tool(compiler, *CFLAGS, f"-I{CLIENTS}", *sources, "-o", str(folder / "both"), timeout=300)
    assert (built.returncode, built.stderr) == (0, b"")
    assert run_tool(str(folder / "both")).returncode == 0
    plus = tool("c++")
    checked = run_tool(plus, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{CLIENTS}", "-x", "c++", sources[1])
    assert (checked.returncode, checked.stderr) == (0, b"")
