"""A runtime without a model: it says what its script says, as slowly and as unreliably as the script wants.

It is a real implementation of `core.step.Runtime`, for tests and for `serve --runtime fake:SCRIPT`. Its key/value
cache is the list of token ids that each slot holds, and without a script the next token is a function of that whole
list, so a caller that mixes up slots or positions gets other tokens or an `AssertionError`, not a plausible answer.

Logits of a row: `margin` for the scripted token, half of it for the token that the history leads to, 0 for the rest.
So a masked or penalised scripted token is replaced by a definite other one. Hidden states are a function of all tokens
so far, too, and as long as the script wants.

The script is a JSON object (`FakeScript`), a file that holds one, or token ids with commas between (`9707,11,151645`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias, TypedDict, Unpack

import msgspec
import numpy as np

from edgeqwen.core.step import Batch, Chunk, Hidden, KVData, Logits, RuntimeSpec, StepResult
from edgeqwen.errors import ConfigInvalid, RuntimeFailed

Count = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Sleep: TypeAlias = Callable[[float], None]

_HASH_BITS = (1 << 64) - 1
_PROGRESS_STEPS = 20
_ID_BYTES = 4
"""Of the cache of a token: the id stands first, the rest is zero."""


class FakeScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a `FakeRuntime` does; all keys are optional.

    `tokens` is said by every sequence, or `scripts` by the sequences in turn (the n-th new sequence says the n-th list,
    then the first again). After the last id a sequence starts over (`loop`), or says `eos` for ever, or, without `eos`,
    goes on with tokens that its history leads to (as it does from the start without a script).

    A step takes `step_s`, and more for long chunks: `prefill_token_s` for each token of one of which at most the last
    gives logits, else (a chunk of guesses) `row_s` for each row of logits behind the first. Loading takes `load_s`.
    Steps are counted from 1: `hang_at_step` takes `hang_s` more, `fail_at_step` raises, `nan_at_step` yields NaN.
    `fail_load` is the message that loading fails with. `records` false: no batches are kept, so memory can be measured.
    `eos`, `vocab_size`, `num_tokens`, `num_slots`, `capacity`, `max_chunk` and `kv_bytes_per_token` replace what the
    caller gives. `hidden_size` 0: there are no hidden states.
    """

    tokens: tuple[TokenId, ...] = ()
    scripts: tuple[tuple[TokenId, ...], ...] = ()
    loop: bool = False
    eos: TokenId | None = None
    margin: Annotated[float, msgspec.Meta(gt=0)] = 40.0
    step_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    row_s: Seconds = 0.0
    load_s: Seconds = 0.0
    hang_at_step: Count | None = None
    hang_s: Seconds = 3600.0
    fail_at_step: Count | tuple[Count, ...] = ()
    nan_at_step: Count | tuple[Count, ...] = ()
    fail_load: str | None = None
    records: bool = True
    vocab_size: Count | None = None
    num_tokens: Count | None = None
    num_slots: Count | None = None
    capacity: Count | None = None
    max_chunk: Count | None = None
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=_ID_BYTES)] | None = None
    hidden_size: Annotated[int, msgspec.Meta(ge=0)] = 8


def parse_fake(spec: str) -> FakeScript:
    """The script that `fake:SCRIPT`, or SCRIPT alone, names. Raises `ConfigInvalid`, which names the key at fault."""
    text = spec.removeprefix("fake:").strip()
    if not text:
        return FakeScript()
    if text.startswith("{"):
        return _decode(text.encode(), "the script of the fake runtime")
    ids = text.split(",")
    if all(part.strip().isdecimal() for part in ids):
        return FakeScript(tokens=tuple(int(part) for part in ids))
    try:
        data = Path(text).read_bytes()
    except OSError as error:
        raise ConfigInvalid(
            f"fake runtime: {text!r} is neither a list of token ids nor a script that can be read ({error.strerror})"
        ) from error
    return _decode(data, text)


def _decode(data: bytes, name: str) -> FakeScript:
    try:
        script = msgspec.json.decode(data, type=FakeScript)
    except (msgspec.DecodeError, RecursionError) as error:  # it says where, e.g. "at `$.tokens[1]`"
        raise ConfigInvalid(f"{name}: {error}") from error
    if script.tokens and script.scripts:
        raise ConfigInvalid(f"{name}: `tokens` and `scripts` exclude each other; keep one")
    if script.vocab_size and script.num_tokens and script.num_tokens > script.vocab_size:
        raise ConfigInvalid(f"{name}: `num_tokens` {script.num_tokens} is above `vocab_size` {script.vocab_size}")
    return script


@dataclass(slots=True)
class _Held:
    """What a slot holds: the token ids, their hash, and the script of the sequence, which begins after `prompt_len`
    tokens (None before the first row of logits).
    """

    ids: list[int] = field(default_factory=list)
    digest: int = 0
    script: tuple[int, ...] = ()
    prompt_len: int | None = None


class FakeOptions(TypedDict, total=False):
    """What may be given to a `FakeRuntime` beside its script, which goes before."""

    vocab_size: int
    num_tokens: int | None
    num_slots: int
    capacity: int
    eos: int | None


class FakeRuntime:
    """Implements `core.step.Runtime`; see the module. `batches` records every batch it was given, in order.

    `sleep` is called with the seconds that a step takes (a virtual clock in tests). Scripted ids must be below
    `vocab_size`, else `ConfigInvalid`.
    """

    def __init__(
        self,
        script: FakeScript,
        *,
        vocab_size: int = 151936,
        num_tokens: int | None = None,
        num_slots: int = 8,
        capacity: int = 8192,
        eos: int | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        vocab = script.vocab_size or vocab_size
        self._spec = RuntimeSpec(
            num_slots=script.num_slots or num_slots,
            capacity=script.capacity or capacity,
            vocab_size=vocab,
            num_tokens=min(vocab, script.num_tokens or num_tokens or vocab),
            kv_bytes_per_token=script.kv_bytes_per_token or 1024,
            max_chunk=script.max_chunk or 512,
            kv_fingerprint="fake",
            hidden_size=script.hidden_size,
        )
        self._script = script
        self._eos = eos if script.eos is None else script.eos
        self._sleep = sleep
        self._scripts = script.scripts or ((script.tokens,) if script.tokens else ())
        self._held: dict[int, _Held] = {}
        self._rows: dict[int, Logits] = {}
        self._num_sequences = 0
        self._num_steps = 0
        self.batches: list[Batch] = []
        self.is_closed = False
        highest = max((token for ids in self._scripts for token in ids), default=0)
        if max(highest, self._eos or 0) >= vocab:
            raise ConfigInvalid(f"fake runtime: a token id of the script is above `vocab_size` {vocab}")

    @property
    def spec(self) -> RuntimeSpec:
        return self._spec

    @property
    def held_slots(self) -> tuple[int, ...]:
        """Slots that hold something; empty when everything was released."""
        return tuple(sorted(self._held))

    def step(self, batch: Batch) -> StepResult:
        assert not self.is_closed, "step after close"
        slots = [chunk.slot for chunk in batch.chunks]
        assert slots == sorted(set(slots)), f"slots not ascending and distinct: {slots}"
        self._num_steps += 1
        if self._script.records:
            self.batches.append(batch)
        self._sleep(self._duration_s(batch))
        if _is_listed(self._num_steps, self._script.fail_at_step):
            for slot in slots:
                self._held.pop(slot, None)
            raise RuntimeFailed(f"the fake runtime fails at step {self._num_steps}, as its script says")
        hidden = tuple(np.empty((chunk.num_hidden, self._spec.hidden_size), np.float32) for chunk in batch.chunks)
        logits = tuple(self._compute(chunk, rows) for chunk, rows in zip(batch.chunks, hidden, strict=True))
        return StepResult(logits, hidden if any(chunk.num_hidden for chunk in batch.chunks) else ())

    def _duration_s(self, batch: Batch) -> float:
        script = self._script
        num_prefill = sum(len(chunk.ids) for chunk in batch.chunks if len(chunk.ids) > 1 >= chunk.num_logits)
        num_guessed = sum(max(0, chunk.num_logits - 1) for chunk in batch.chunks)
        hang_s = script.hang_s if self._num_steps == script.hang_at_step else 0.0
        return script.step_s + script.prefill_token_s * num_prefill + script.row_s * num_guessed + hang_s

    def _compute(self, chunk: Chunk, hidden: Hidden) -> Logits:
        assert chunk.ids, chunk
        assert 0 <= chunk.num_logits <= len(chunk.ids), chunk
        assert 0 <= chunk.num_hidden <= (len(chunk.ids) if self._spec.hidden_size else 0), chunk
        assert 0 <= chunk.slot < self._spec.num_slots, chunk
        assert chunk.stop <= self._spec.capacity, chunk
        assert all(0 <= token < self._spec.vocab_size for token in chunk.ids), "a token id outside the vocabulary"
        held = self._sequence_of(chunk)
        rows = self._blank_rows(chunk)
        for position, token in enumerate(chunk.ids):
            held.ids.append(token)
            held.digest = _mix(held.digest, token)
            row = position - (len(chunk.ids) - chunk.num_logits)
            if row >= 0:
                self._fill(rows[row], held)
            row = position - (len(chunk.ids) - chunk.num_hidden)
            if row >= 0:
                hidden[row] = np.random.default_rng(held.digest).standard_normal(self._spec.hidden_size)
        if _is_listed(self._num_steps, self._script.nan_at_step):
            rows[:] = np.nan
            hidden[:] = np.nan
        return rows

    def _sequence_of(self, chunk: Chunk) -> _Held:
        """What the slot holds before the chunk: a new sequence at 0, else `[0, start)` of the one that is there."""
        held = self._held.get(chunk.slot)
        held_len = len(held.ids) if held else 0
        assert chunk.start <= held_len, f"slot {chunk.slot} holds {held_len} tokens, the chunk starts at {chunk.start}"
        if held is None or chunk.start == 0:
            held = self._held[chunk.slot] = _Held(script=self._next_script())
        elif chunk.start < held_len:
            held.ids = held.ids[: chunk.start]
            if chunk.start < (held.prompt_len or 0):
                held.prompt_len = None
            held.digest = _digest(held.ids)
        return held

    def _next_script(self) -> tuple[int, ...]:
        if not self._scripts:
            return ()
        self._num_sequences += 1
        return self._scripts[(self._num_sequences - 1) % len(self._scripts)]

    def _blank_rows(self, chunk: Chunk) -> Logits:
        rows = self._rows.get(chunk.slot)
        if rows is None or len(rows) < chunk.num_logits:
            rows = self._rows[chunk.slot] = np.empty((chunk.num_logits, self._spec.vocab_size), np.float32)
        rows = rows[: chunk.num_logits]
        rows.fill(0.0)
        return rows

    def _fill(self, row: Logits, held: _Held) -> None:
        if held.prompt_len is None:
            held.prompt_len = len(held.ids)
        led_to = (held.digest >> 17) % self._spec.num_tokens
        row[led_to] = self._script.margin / 2
        scripted = self._scripted(held, len(held.ids) - held.prompt_len)
        row[led_to if scripted is None else scripted] = self._script.margin

    def _scripted(self, held: _Held, num_said: int) -> int | None:
        if not held.script:
            return None
        if num_said < len(held.script) or self._script.loop:
            return held.script[num_said % len(held.script)]
        return self._eos

    def read_kv(self, slot: int, start: int, stop: int) -> KVData:
        held = self._held[slot]
        assert 0 <= start <= stop <= len(held.ids), f"[{start}, {stop}) of {len(held.ids)} tokens"
        rows = np.zeros((stop - start, self._spec.kv_bytes_per_token), np.uint8)
        rows[:, :_ID_BYTES] = np.array(held.ids[start:stop], "<u4").reshape(-1, 1).view(np.uint8)
        return rows

    def expect_kv(self, slot: int, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= self._spec.capacity

    def write_kv(self, slot: int, start: int, data: KVData) -> None:
        held = self._held.get(slot)
        assert start <= (len(held.ids) if held else 0)
        if held is None or start < len(held.ids):  # a new sequence, which may go on from what an earlier one left
            kept = held.ids[:start] if held else []
            held = self._held[slot] = _Held(kept, script=self._next_script())
        rows = np.frombuffer(data, np.uint8).reshape(-1, self._spec.kv_bytes_per_token)
        assert start + len(rows) <= self._spec.capacity
        held.ids[start:] = np.ascontiguousarray(rows[:, :_ID_BYTES]).view("<u4").ravel().tolist()
        held.digest = _digest(held.ids)

    def move(self, src: int, dst: int) -> None:
        assert dst not in self._held, f"slot {dst} is not free"
        self._held[dst] = self._held.pop(src)

    def release(self, slot: int) -> None:
        self._held.pop(slot, None)

    def close(self) -> None:
        self._held.clear()
        self.is_closed = True


def load_fake(
    script: FakeScript, progress: Callable[[float], None], *, sleep: Sleep = time.sleep, **options: Unpack[FakeOptions]
) -> FakeRuntime:
    """A `FakeRuntime` after `load_s`, with `progress` told on the way. Raises `RuntimeFailed` if the script says so."""
    for done in range(_PROGRESS_STEPS):
        progress(done / _PROGRESS_STEPS)
        if script.load_s:
            sleep(script.load_s / _PROGRESS_STEPS)
    if script.fail_load is not None:
        raise RuntimeFailed(script.fail_load)
    progress(1.0)
    return FakeRuntime(script, sleep=sleep, **options)


def _is_listed(step: int, steps: int | tuple[int, ...]) -> bool:
    return step == steps if isinstance(steps, int) else step in steps


def _mix(digest: int, token: int) -> int:
    """One step of a multiplicative hash with an odd constant (the golden ratio's 64 bits, as in Fibonacci hashing)."""
    mixed = ((digest ^ (token + 1)) * 0x9E3779B97F4A7C15) & _HASH_BITS
    return mixed ^ (mixed >> 29)


def _digest(ids: Sequence[int]) -> int:
    digest = 0
    for token in ids:
        digest = _mix(digest, token)
    return digest
