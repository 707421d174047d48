"""Bytes to characters, a few bytes at a time.

The rule, for streamed and collected text alike: the text is what `bytes.decode("utf-8", "replace")` makes of all
bytes together. So a character split over tokens is held back until it is whole, bytes that can never become one are
U+FFFD at once, and a character that is still torn when the text ends (the token budget ran out inside it) is one
U+FFFD.
"""

from __future__ import annotations

import codecs


class IncrementalDetokenizer:
    """Collects bytes and gives out whole code points."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The characters that `data` completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is still held back, as U+FFFD; afterwards a new text may begin."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail
