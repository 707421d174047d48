"""Who waits for whom: streams while a long prompt is computed, and a short prompt behind a long one."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from benchmarks.conversations.setup import Setup
from benchmarks.conversations.talk import Talk
from edgeqwen.errors import EdgeqwenError

NUM_STREAMS: Final = 3
STREAM_TOKENS: Final = 600
LONG: Final = 3000
VERY_LONG: Final = 7000
SHORT: Final = 20
HEAD_START_S: Final = 0.3
SETTLED_IN: Final = 20
"""Pieces of text of each stream before the long prompt comes."""


class Streams:
    """Streams that decode at the same time; `times` are those at which each got a piece of text."""

    def __init__(self, talk: Talk) -> None:
        self.times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._talks = [talk.other() for _ in self.times]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_STREAMS)]
        self._is_over = False

    def _run(self, number: int) -> None:
        talk = self._talks[number]
        options: dict[str, Any] = {"max_tokens": STREAM_TOKENS, "ignore_eos": True, "speculate": False}
        try:
            talk.turn(prompt=f"Count to {number}.", on_text=self.times[number].append, **options)
        except (EdgeqwenError, OSError):
            assert self._is_over, "a stream failed"

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        while any(len(each) < SETTLED_IN for each in self.times):
            assert any(thread.is_alive() for thread in self._threads), "the streams have ended"
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def gaps_ms(self, start: float, stop: float) -> list[float]:
        """Between two pieces of text of a stream, of those that end within the time."""
        pairs = (pair for each in self.times for pair in itertools.pairwise(each))
        return [1e3 * (after - before) for before, after in pairs if start < after <= stop]


def long_prompt_beside_streams(setup: Setup) -> None:
    """The longest gap of streams while a prompt of 3,000 tokens is computed, and how long a piece of that takes."""
    worst, pieces, steps, ratios = [], [], [], []
    for number in range(setup.samples):
        with setup.state() as state, setup.daemon(state) as talk, Streams(talk) as streams:
            text = talk.text(LONG, f"long {number}")
            began = time.perf_counter()
            before = streams.gaps_ms(0.0, began)
            long = talk.turn("generate", prompt=text, max_tokens=1, cache=False)
            gaps = streams.gaps_ms(began, began + long.first_s)
            # A gap is one piece of the prompt and one step of all streams.
            step = statistics.median(before)
            piece = statistics.median(gap for gap in gaps if gap > 2 * step) - step
            worst.append(max(gaps))
            pieces.append(piece)
            steps.append(step)
            ratios.append((max(gaps) - step) / piece)
    setup.report(
        "long prompt beside streams",
        streams=NUM_STREAMS,
        prompt=LONG,
        longest_gap_ms=round(max(worst), 1),
        chunk_ms=round(statistics.median(pieces), 1),
        decode_step_ms=round(statistics.median(steps), 1),
        longest_gap_in_chunks=round(max(ratios), 2),
        holds=max(ratios) <= 2,
    )


def short_behind_long(setup: Setup) -> None:
    """Time to the first token of a short prompt, alone and behind one of 7,000 tokens."""
    alone, behind = [], []
    with setup.state() as state, setup.daemon(state) as talk:
        for number in range(setup.samples):
            alone.append(_short(talk, f"alone {number}"))
            other, text = talk.other(), talk.text(VERY_LONG, f"very long {number}")
            with ThreadPoolExecutor(1) as pool:
                long = pool.submit(other.turn, "generate", prompt=text, max_tokens=1, cache=False)
                time.sleep(HEAD_START_S)
                assert not long.done(), "the long prompt is over already"
                behind.append(_short(talk, f"behind {number}"))
                is_first = not long.done()
                long.result()
            other.close()
            assert is_first, "the short prompt had to wait for all of the long one"
    setup.report(
        "short prompt behind a long one",
        short=SHORT,
        long=VERY_LONG,
        first_token_ms=round(statistics.median(behind), 1),
        most_ms=round(max(behind), 1),
        alone_ms=round(statistics.median(alone), 1),
    )


def _short(talk: Talk, seed: str) -> float:
    """Milliseconds."""
    return 1e3 * talk.turn("generate", prompt=talk.text(SHORT, seed), max_tokens=2, cache=False).first_s
