"""What the torch runtime is asked for. Imports nothing of torch: whoever decides on it may not have it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal, TypeAlias

from edgeqwen.core.model import KVType
from edgeqwen.cpu import ThreadPlan
from edgeqwen.errors import ConfigInvalid

Mode: TypeAlias = Literal["eager", "compile"]
WeightType: TypeAlias = Literal["fp32", "bf16", "int8", "woq8"]

KV_TYPES: Final[tuple[KVType, ...]] = ("fp32", "bf16")


BYTES_PER_WEIGHT: Final[dict[WeightType, int]] = {"fp32": 4, "bf16": 2, "int8": 1, "woq8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """`capacity` is the tokens that a slot holds. `computes_bf16`: attention and the results of products are bf16 with
    weights of 8 bits, too; else they are fp32. `kv_type` None: as what is computed in. `max_isa` is a name of oneDNN's,
    or `auto`.

    `identity` names the checkpoint, for what is kept of keys and values. `code_dir` is where compiled code is kept.
    `profile_path`: where what is measured of this machine is kept; None: nothing is measured.
    """

    threads: ThreadPlan
    num_slots: int = 8
    capacity: int = 4096
    mode: Mode = "eager"
    weights: WeightType = "fp32"
    computes_bf16: bool = False
    max_isa: str = "auto"
    kv_type: KVType | None = None
    identity: str = ""
    code_dir: Path | None = None
    profile_path: Path | None = None

    @property
    def is_bf16(self) -> bool:
        """Whether anything is computed in bf16."""
        return self.weights == "bf16" or (self.computes_bf16 and self.weights != "fp32")


def check_kv_type(kv_type: str) -> None:
    """Raise `ConfigInvalid` for a type of cache that torch does not keep."""
    if kv_type not in KV_TYPES:
        raise ConfigInvalid(f"kv.type: torch keeps keys and values in fp32 or bf16, not in {kv_type}; take auto")


def installed_version(package: str) -> str | None:
    """Version of an installed package, which is not imported for it; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
