"""A package: whole or not, made for this processor or another, and whether it fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgeqwen import __version__
from edgeqwen.config import KvTable
from edgeqwen.core.model import KVType, Manifest
from edgeqwen.core.package import open_package, verify_digests
from edgeqwen.cpu import Memory, Processor
from edgeqwen.doctor.finding import Finding, size_text
from edgeqwen.errors import EXIT_CONFIG, FileError

BASE_BYTES: Final = 130 << 20
"""The interpreter with all libraries, before any weights."""

WEIGHT_BYTES: Final = {"int4": 471e6, "int8": 637e6, "hybrid": 977e6, "fp32": 2385e6}
"""Of Qwen3-0.6B's packages, to say what there is room for before one is made."""

KV_BYTES: Final[dict[KVType, int]] = {"fp32": 4, "int8": 1}
"""Of a number in the cache."""

ROW_QUANTS: Final = ("int8", "hybrid")
"""Those whose weights have a form that depends on the processor."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes: weights and libraries, and the cache of one conversation of full length."""

    weights: int
    conversation: int


def needs_of(manifest: Manifest, context: int) -> Needs:
    """What serving needs at least, with the package's own type of cache."""
    weights = sum(size for name, size in manifest.sizes.items() if name.endswith((".onnx", ".bin")))
    return Needs(BASE_BYTES + weights, KV_BYTES[manifest.kv_types[0]] * manifest.spec.kv_floats_per_token * context)


@dataclass(frozen=True, slots=True)
class PackageReport:
    """`facts` is empty if the package cannot be opened."""

    facts: dict[str, Any]
    findings: tuple[Finding, ...]


def examine_package(path: Path, processor: Processor, memory: Memory, kv: KvTable) -> PackageReport:
    """Read all of a package and compare it with the machine; `kv` says how it would be served."""
    try:
        package = open_package(path)
        verify_digests(package)
    except FileError as error:
        text, _, advice = error.message.partition("; ")
        finding = Finding(
            "error", "package", text, advice or "give another package, or import it again", error.exit_code
        )
        return PackageReport({"path": str(path)}, (finding,))
    manifest = package.manifest
    context = kv.context_of(manifest.spec.max_position)
    needs = needs_of(manifest, context)
    facts = {
        "path": str(path),
        "name": manifest.name,
        "quant": manifest.quant,
        "target": manifest.target,
        "weight_form": manifest.weight_form,
        "bytes": sum(manifest.sizes.values()),
        "needed_bytes": needs.weights,
        "conversation_bytes": needs.conversation,
        "context": context,
    }
    findings = (*fit_findings(path, manifest, processor), *room_findings(manifest, needs, memory, num_slots=kv.slots))
    return PackageReport(facts, findings)


def quant_findings(memory: Memory) -> Iterator[Finding]:
    """Which quants of Qwen3-0.6B there is no room for, where no package is at hand."""
    if not memory.most:
        return
    needs = {quant: BASE_BYTES + size for quant, size in WEIGHT_BYTES.items()}
    if needs["int4"] > memory.most:
        text = f"even int4 of Qwen3-0.6B needs {size_text(needs['int4'])}, there are {size_text(memory.most)} in all"
        yield Finding("warning", "memory-too-small", text, "take a smaller model (SmolLM2-135M)")
    elif large := {quant: need for quant, need in needs.items() if need > memory.free}:
        listed = ", ".join(f"{quant} ({size_text(need)})" for quant, need in large.items())
        text = f"{size_text(memory.free)} are free: too little for Qwen3-0.6B as {listed}"
        yield Finding("note", "memory-scarce", text, "import with another --quant, or stop what takes the memory")


def fit_findings(path: Path, manifest: Manifest, processor: Processor) -> Iterator[Finding]:
    """Whether the weights have the form that this processor multiplies rightly and fastest."""
    depends = manifest.quant in ROW_QUANTS
    if depends and manifest.weight_form == "signed" and processor.target == "any":
        yield Finding(
            "warning",
            "weight-form",
            f"{manifest.name} was made for processors with VNNI, which this is not",
            _remaking(path, "any"),
        )
    if depends and manifest.weight_form == "unsigned" and processor.target != "any":
        yield Finding(
            "warning",
            "weight-form",
            f"{manifest.name} was made to run on any processor: its prompts are several times slower than they need be",
            _remaking(path, processor.target),
        )
    if manifest.builder_version != __version__:
        yield Finding(
            "note",
            "builder-version",
            f"{manifest.name} was made by edgeqwen {manifest.builder_version}, this is {__version__}",
            "import it again to have what has been improved since",
        )


def _remaking(path: Path, target: str) -> str:
    return (
        f"`edgeqwen import {path} --target {target} --out {path}` remakes it in place; until then the daemon keeps a "
        "copy of its own that fits"
    )


def room_findings(manifest: Manifest, needs: Needs, memory: Memory, *, num_slots: int) -> Iterator[Finding]:
    """Whether the model fits, and what conversations may take beside it. Nothing where memory is not known."""
    smaller = "take a smaller quant (int4 takes least) or a smaller model"
    weights, most = size_text(needs.weights), size_text(memory.most)
    if memory.most and needs.weights > memory.most:
        text = f"{manifest.name} ({manifest.quant}) needs {weights} before the first token, there are {most} in all"
        yield Finding("error", "memory-too-small", text, smaller, EXIT_CONFIG)
        return
    one = needs.weights + needs.conversation
    if memory.free and one > memory.free:
        text = (
            f"{manifest.name} ({manifest.quant}) needs {weights}, and a conversation of full length "
            f"{size_text(needs.conversation)}; {size_text(memory.free)} are free"
        )
        yield Finding("warning", "memory-scarce", text, f"lower --context, {smaller}, or stop what takes the memory")
    full = needs.weights + num_slots * needs.conversation
    if memory.most and one <= memory.most < full:
        text = f"{num_slots} conversations of full length would need {size_text(full)}, there are {most} in all"
        yield Finding("note", "slots", text, "lower --slots or --context")
    high = memory.limits.high
    if high is not None and needs.weights > high:
        text = f"a control group slows the process down above {size_text(high)}, {manifest.name} needs {weights}"
        yield Finding("warning", "memory-high", text, "raise MemoryHigh above that")
