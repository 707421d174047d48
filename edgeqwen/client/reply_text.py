"""The text of a reply out of its bytes, without making anything of the rest.

msgspec decodes into a type that names nothing but the text and skips what else there is, log-probabilities above all,
checking that it is JSON. `benchmarks/reply_text.py` compares this with parsing all of the reply, and with ijson, which
stops at the text: that wins where much follows a short text, and loses where the text is most of the reply.
"""

from __future__ import annotations

from typing import Final

import msgspec

from edgeqwen.client.failures import CutOff


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None


class _Reply(msgspec.Struct):
    text: str | None = None
    choices: list[_Choice] = []


_DECODER: Final = msgspec.json.Decoder(_Reply)


def text_of(reply: bytes | bytearray | memoryview | str) -> str:
    """The text of a final frame of the socket, or of a whole answer in OpenAI's format (chat or not); of several
    choices the first one's. Raises `CutOff` if it is neither.
    """
    try:
        found = _DECODER.decode(reply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise CutOff("this is not a reply") from exc
    if found.text is not None:
        return found.text
    if not found.choices:
        raise CutOff("there is no text in this reply")
    first = found.choices[0]
    return (first.text if first.message is None else first.message.content) or ""
