"""The text that calibration is done on, as windows of token ids.

Of this project's own writing, and none of what quality is measured on: prose, source code in many languages, Chinese,
and conversations with their markers, which the tokenizer turns into its control tokens where it knows them.
"""

from __future__ import annotations

from importlib import resources
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeqwen.convert.checkpoint import Checkpoint
from edgeqwen.core.model import ModelSpec

Windows: TypeAlias = NDArray[np.int64]

TEXTS: Final = ("english", "code", "dialogue", "chinese")
WINDOW_LEN: Final = 512
MOST_WINDOWS: Final = 40
LEAST_WINDOWS: Final = 8
WEIGHTS_TIMES_TOKENS: Final = 2.5e12
"""What a calibration may cost: a model of 0.6 billion weights is imported in less than ten minutes on two cores."""


def num_windows(spec: ModelSpec) -> int:
    """How many windows of text a model of this size is calibrated on."""
    affordable = WEIGHTS_TIMES_TOKENS / (spec.num_layer_weights * WINDOW_LEN)
    return int(min(MOST_WINDOWS, max(LEAST_WINDOWS, affordable)))


def calibration_windows(
    checkpoint: Checkpoint, *, window_len: int = WINDOW_LEN, most_windows: int = MOST_WINDOWS
) -> Windows:
    """Int64 `[windows, window_len]` by the checkpoint's tokenizer; a tokenizer of many small tokens fills them all."""
    length = min(window_len, checkpoint.spec.max_position)
    tokenizer = Tokenizer.from_buffer(checkpoint.side_files.tokenizer_json)
    folder = resources.files("edgeqwen.data") / "calibration"
    ids: list[int] = []
    for name in TEXTS:
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        ids += tokenizer.encode(text, add_special_tokens=False).ids
    windows = np.array(ids[: len(ids) // length * length], np.int64).reshape(-1, length)
    if len(windows) > most_windows:
        windows = windows[np.linspace(0, len(windows) - 1, most_windows).round().astype(np.intp)]
    return windows
