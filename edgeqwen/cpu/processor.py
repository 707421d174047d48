"""What the processor can do: its instruction sets, and the target whose int8 weights it multiplies rightly.

On x86 the integer kernel for signed weights multiplies unsigned activations by signed weights. With VNNI or AMX that is
one instruction, exact. With AVX2 or AVX-512 alone it adds pairs of products in saturating 16-bit arithmetic
(`vpmaddubsw`) and is silently wrong for large values; unsigned weights take another kernel that widens first, and is
exact everywhere. 64-bit ARM has no such instruction and is exact with signed weights.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from edgeqwen.cpu.sysfiles import read_number, read_text
from edgeqwen.errors import ConfigInvalid

Target = Literal["any", "vnni", "arm"]

NEEDED_X86_FLAGS: Final = ("ssse3", "sse4_1", "sse4_2", "popcnt")
"""What the x86-64-v2 builds of the native libraries execute without asking."""

TELLING_FLAGS: Final = (
    *("sse4_2", "avx", "fma", "f16c", "avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16"),
    *("avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
"""Flags by which libraries choose their kernels. Others come and go with microcode and mitigations."""

BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Any of them: products of bf16 in hardware, on x86 and (the last) on ARM."""

IDENTITY_FIELDS: Final = (
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("cpu implementer", "cpu architecture", "cpu variant", "cpu part", "cpu revision"),
)
NAME_FIELDS: Final = ("vendor_id", "model name", "stepping", "cpu implementer", "cpu part")

DIGEST_LEN: Final = 12


@dataclass(frozen=True, slots=True)
class Processor:
    """`machine` as `uname -m` says, `flags` as the kernel lists them; both empty of meaning where it lists nothing.

    `identity` is what tells this model of processor from others, in the kernel's words.
    """

    machine: str
    name: str
    flags: frozenset[str]
    identity: str = ""

    @property
    def has_vnni(self) -> bool:
        """8-bit dot products that do not saturate (AVX-512 VNNI, AVX-VNNI or AMX)."""
        return bool(self.flags & {"avx512_vnni", "avx_vnni", "amx_int8"})

    @property
    def is_x86(self) -> bool:
        return self.machine == "x86_64"

    @property
    def is_arm(self) -> bool:
        return self.machine in {"aarch64", "arm64"}

    @property
    def computes_bf16(self) -> bool:
        """Whether it multiplies bf16 in hardware."""
        return bool(self.flags & BF16_FLAGS)

    @property
    def is_virtual(self) -> bool:
        """Whether a hypervisor says that it is there (x86 only). It may hide instruction sets and cores."""
        return "hypervisor" in self.flags

    @property
    def target(self) -> Target:
        """What a package made for this processor is made for: `vnni` and `arm` have signed weights, `any` unsigned
        ones.
        """
        if self.is_arm:
            return "arm"
        return "vnni" if self.has_vnni else "any"

    @property
    def features(self) -> tuple[str, ...]:
        """The flags that decide which kernels run, for reports."""
        telling = ("avx", "avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
        return tuple(flag for flag in telling if flag in self.flags)


def read_processor(root: Path = Path("/"), machine: str | None = None) -> Processor:
    """The processor described by `root`/proc/cpuinfo; without flags where that cannot be read."""
    return parse_cpuinfo(read_text(root / "proc/cpuinfo"), machine or platform.machine())


def parse_cpuinfo(text: str, machine: str) -> Processor:
    """The first processor of /proc/cpuinfo: `flags` and `model name` on x86, `Features` and `CPU part` on ARM."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return Processor(
        machine=machine,
        name=" ".join(fields[key] for key in NAME_FIELDS if key in fields),
        flags=frozenset(flags.split()),
        identity=" ".join(f"{key}={fields[key]}" for key in IDENTITY_FIELDS if key in fields),
    )


def missing_flags(processor: Processor) -> tuple[str, ...]:
    """What the native libraries need and the processor lacks; none where its flags are not known."""
    if not processor.is_x86 or not processor.flags:
        return ()
    return tuple(flag for flag in NEEDED_X86_FLAGS if flag not in processor.flags)


def check_processor(processor: Processor) -> None:
    """Raise `ConfigInvalid` if the native libraries would die of an illegal instruction here.

    To be called before any of them is imported, numpy among them.
    """
    if missing := missing_flags(processor):
        raise ConfigInvalid(f"this processor ({processor.name or 'unnamed'}) is too old: it lacks {', '.join(missing)}")


def fingerprint(processor: Processor, *, thread_counts: Sequence[int], runtime_version: str) -> str:
    """Short hex digest for what was measured here: it changes when the measurements may.

    `thread_counts` are those of the thread plan, `runtime_version` that of the library that brings the kernels. Flags
    that a microcode update adds or takes away do not count.
    """
    telling = [flag for flag in TELLING_FLAGS if flag in processor.flags]
    parts = [processor.machine, processor.identity, *telling, *map(str, thread_counts), runtime_version]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:DIGEST_LEN]


def clock_mhz(root: Path = Path("/")) -> int | None:
    """The highest clock that any CPU runs at right now, in MHz; None where the kernel does not say."""
    kilohertz = [
        frequency
        for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
        if (frequency := read_number(path)) is not None
    ]
    if kilohertz:
        return max(kilohertz) // 1000
    lines = read_text(root / "proc/cpuinfo").splitlines()
    words = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("cpu mhz")]
    return max((int(float(word)) for word in words if _is_decimal(word)), default=None)


def _is_decimal(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()
