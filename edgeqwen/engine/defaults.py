"""Sampling defaults out of a model's `generation_config.json`.

* `do_sample: false` means greedy, whatever else the file holds.
* A file that names any sampling value, or `do_sample: true`, is read as its authors' tools read it: values that it
  leaves out are temperature 1, top-k 50, top-p 1.
* A file that says nothing of sampling gets `UNSAID`: moderate sampling, since small models repeat themselves greedily.

`null` is "not given". A value of the wrong kind or out of range is an error that names the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgeqwen.engine.checks import floating, integer
from edgeqwen.errors import BadRequest, ModelInvalid

FILE_NAME: Final = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request that leaves these out gets."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


UNSAID: Final = SamplingDefaults(temperature=0.7, top_k=40, top_p=0.95)


def read_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults that `config` (the parsed file, possibly empty) stands for. Raises `ModelInvalid`."""
    try:
        penalty = floating("repetition_penalty", config.get("repetition_penalty"), above=0, most=10)
        values = {
            "temperature": floating("temperature", config.get("temperature"), least=0, most=100),
            "top_k": integer("top_k", config.get("top_k"), least=0, most=1 << 31),
            "top_p": floating("top_p", config.get("top_p"), above=0, most=1),
            "min_p": floating("min_p", config.get("min_p"), least=0, most=1),
        }
    except BadRequest as error:
        raise ModelInvalid(f"{FILE_NAME}: {error.message}") from error
    is_sampling = config.get("do_sample")
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    base = SamplingDefaults() if given or is_sampling else UNSAID
    if is_sampling is False:
        base, given = SamplingDefaults(temperature=0.0, top_k=0), {}
    merged: dict[str, Any] = {name: getattr(base, name) for name in values} | given
    return SamplingDefaults(**merged, repetition_penalty=1.0 if penalty is None else penalty)
