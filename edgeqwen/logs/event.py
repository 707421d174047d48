"""An event of the log: a name, and fields with values of one line. Never the text of a prompt or an answer."""

from __future__ import annotations

import re
import traceback
import uuid
from types import TracebackType
from typing import Final

from edgeqwen.errors import EdgeqwenError

NAMESPACE: Final = uuid.UUID("6f1c1a0e-5d0e-5f0b-9a53-0d5a3a0c8f77")
"""Of message ids, which must stay what they are: people search by them."""

_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

Field = str | int | float | None


class Event:
    """`log.info(Event("ready", model=name))`: reads `ready model=name` as text, and is fields to whoever takes them.

    A field that is None is left out.
    """

    __slots__ = ("fields", "name")

    def __init__(self, name: str, /, **fields: Field) -> None:
        self.name = name
        self.fields = {key: value for key, value in fields.items() if value is not None}

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={_spelt(value)}" for key, value in self.fields.items())])

    @property
    def message_id(self) -> str:
        """The same for all events of this name: 32 hexadecimal digits (systemd.journal-fields(7))."""
        return uuid.uuid5(NAMESPACE, self.name).hex


def _spelt(value: str | float) -> str:
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else one_line(str(value))
    return f'"{text}"' if " " in text and '"' not in text else text


def one_line(text: str) -> str:
    """`text` without anything that a terminal or a reader of lines would act on."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def describe_error(info: ExcInfo) -> str:
    """Where an exception came from, frame by frame, and its type. What foreign exceptions say may quote what they were
    given, a prompt perhaps; so only our own and the system's are quoted.
    """
    kind, error, trace = info
    if kind is None or error is None:
        return ""
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(trace)]
    is_quoted = isinstance(error, EdgeqwenError | OSError) or kind.__module__.startswith("onnxruntime")
    last = f"{kind.__module__}.{kind.__qualname__}" + (f": {error}" if is_quoted else "")
    return "\n".join(one_line(line) for line in ["Traceback:", *places, last])
