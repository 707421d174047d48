"""Ask a running edgeqwen daemon from MicroPython (1.20 or later) or CPython; this one file is all there is to copy.

    from edgeqwen_micropython import ask
    final = ask("/run/edgeqwen/edgeqwen.sock", "Why?", on_text=print, max_tokens=64)

On the unix port the address is the socket's path. A board reaches the daemon over a bridge on the daemon's machine, and
gives host and port as a tuple; see docs/clients.md. From a shell:

    micropython edgeqwen_micropython.py SOCKET PROMPT [SESSION]

where - is a PROMPT that comes on stdin: an argument of MicroPython's has at most 255 bytes.
"""

import json
import socket
import sys

MAX_LINE_BYTES = 512 << 10  # an answer in one piece has up to 256 KiB, a streamed frame 32
MAX_PATH_BYTES = 107
SILENCE_S = 610  # no answer takes longer than 600 s, and a queued one may be silent until then
_EACCES = 13  # the module errno of a board may lack it
_EXIT_CODES = {
    64: ("bad_request", "unknown_op", "unsupported_version", "duplicate_id"),
    65: ("bad_json", "bad_utf8", "too_large", "timeout", "too_long"),
    69: ("not_found", "no_daemon"),
    74: ("slow_reader", "cut_off"),
    75: ("conflict", "session_busy", "busy", "quota", "loading", "draining"),
    77: ("forbidden",),
    78: ("bad_config", "bad_path"),
}


class EdgeqwenError(Exception):
    """What the daemon answered, or `no_daemon`, `cut_off`, `bad_path`. `exit_code` is what a program may end with."""

    def __init__(self, code, message, field=None, retry_ms=None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_ms = retry_ms
        self.exit_code = 70  # engine, and codes that there may be one day
        for exit_code, codes in _EXIT_CODES.items():
            if code in codes:
                self.exit_code = exit_code


def ask(address, prompt, on_text=None, on_reasoning=None, timeout_s=SILENCE_S, **members):
    """The final frame of a streamed chat. `members` are more of the request, such as session="@notes".

    The callbacks get the text as it comes. Raises `EdgeqwenError`. What a callback raises hangs up: the daemon stops.
    """
    request = {"op": "chat", "stream": True, "close": True, "prompt": prompt}  # close: a board cannot half-close
    request.update(members)
    incoming = frames(address, request, timeout_s)
    try:
        for frame in incoming:
            if frame.get("reasoning") and on_reasoning:
                on_reasoning(_whole(frame["reasoning"]))
            if frame.get("delta") and on_text:
                on_text(_whole(frame["delta"]))
            if frame["done"]:
                return frame
    finally:
        incoming.close()  # at once, which MicroPython would leave to its next collection
    raise AssertionError("frames end with a final one or an error")


def frames(address, request, timeout_s=SILENCE_S):
    """The frames of any one request as they come, the final one included."""
    sock = _connect(address, timeout_s)
    try:
        _send(sock, json.dumps(request).encode() + b"\n")
        lines = sock.makefile("rb")
        while True:
            frame = _parse(_read_line(lines))
            if frame is None or ("id" in frame and frame["id"] != request.get("id")):
                continue  # blank, or the answer to something else
            if frame["done"] and "error" in frame:
                error = frame["error"]
                code = error.get("code", "engine")
                raise EdgeqwenError(code, error.get("message", code), error.get("field"), error.get("retry_ms"))
            yield frame
            if frame["done"]:
                return
    finally:
        sock.close()


def _connect(address, timeout_s):
    if isinstance(address, tuple):
        sock = socket.socket()
        where = socket.getaddrinfo(address[0], address[1])[0][-1]
    else:
        path = address.encode()
        if len(path) > MAX_PATH_BYTES:
            raise EdgeqwenError("bad_path", f"the socket's path has {len(path)} bytes, the limit is 107; shorten it")
        sock = socket.socket(socket.AF_UNIX)
        where = address
        if sys.implementation.name == "micropython":  # it wants the C structure: the family, then the path
            family = socket.AF_UNIX.to_bytes(2, sys.byteorder)
            where = family + path + b"\0"
    number = _connect_to(sock, where, timeout_s)
    if number is None:
        return sock
    sock.close()
    if number == _EACCES:
        raise EdgeqwenError("forbidden", f"{address}: this user may not connect to the daemon")
    raise EdgeqwenError("no_daemon", f"{address}: no daemon; start one with: edgeqwen serve")


def _connect_to(sock, where, timeout_s):
    """None, or the number of the error (MicroPython would complain if one exception were raised from another)."""
    try:
        sock.settimeout(timeout_s)
        sock.connect(where)
    except OSError as error:
        return error.args[0]
    return None


def _send(sock, data):
    """A daemon that turns a connection away closes it at once; its reason can still be read then, so a failure to send
    everything is none here.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except OSError:
            return


def _read_line(lines):
    try:
        line = lines.readline(MAX_LINE_BYTES)
    except OSError:  # reset, or silent for too long
        line = None  # as MicroPython has it when it was silent
    if not line or not line.endswith(b"\n"):
        raise EdgeqwenError("cut_off", "the connection ended before the answer did")
    return line


def _parse(line):
    line = line.strip()
    if not line:
        return None
    try:
        frame = json.loads(line.decode())
        if frame["done"] in (True, False):
            return frame
    except (ValueError, TypeError, KeyError):  # UnicodeError is a ValueError
        pass
    raise EdgeqwenError("cut_off", "the daemon sent something that is not a frame")


def _whole(text):
    """MicroPython leaves the halves of an escaped surrogate pair apart. The daemon does not escape, but it may."""
    if not any(0xD800 <= ord(char) < 0xE000 for char in text):
        return text
    whole, high = "", 0
    for char in text:
        unit = ord(char)
        if 0xDC00 <= unit < 0xE000 and high:
            whole, high = whole[:-1] + chr(0x10000 + ((high - 0xD800) << 10) + unit - 0xDC00), 0
        else:
            high = unit if 0xD800 <= unit < 0xDC00 else 0
            whole += "\ufffd" if 0xD800 <= unit < 0xE000 else char
    return whole


def _main(arguments):
    if len(arguments) not in (2, 3):
        sys.stderr.write("usage: edgeqwen_micropython.py SOCKET PROMPT [SESSION]\n")
        return 64

    def show(text):
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()

    prompt = sys.stdin.read() if arguments[1] == "-" else arguments[1]
    members = {"session": "@" + arguments[2]} if len(arguments) == 3 else {}
    try:
        ask(arguments[0], prompt, on_text=show, on_reasoning=sys.stderr.write, **members)
    except EdgeqwenError as error:
        sys.stderr.write(f"edgeqwen: {error.message} ({error.code})\n")
        return error.exit_code
    except OSError:  # nobody reads the answer
        return 74
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
