"""A package: whole or not, made for this processor or another, and whether it fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgeqwen import __version__
from edgeqwen.config import KvTable
from edgeqwen.core.fit import RUNTIME_BYTES, kv_bytes, loaded_bytes, weights_bytes
from edgeqwen.core.model import Manifest, ModelSpec, Quant
from edgeqwen.core.package import open_package, verify_digests
from edgeqwen.cpu import Memory, Processor
from edgeqwen.doctor.finding import Finding, size_text
from edgeqwen.errors import EXIT_CONFIG, FileError

QUANTS: Final[tuple[Quant, ...]] = ("int4", "int8", "hybrid", "fp32")
ROW_QUANTS: Final = ("int8", "hybrid")
"""Those whose weights have a form that depends on the processor."""

QWEN3: Final = ModelSpec(
    family="qwen3",
    vocab_size=151_936,
    num_tokens=151_669,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_embeddings=True,
    eos_token_ids=(151_645, 151_643),
    has_qk_norm=True,
)
"""The shape of Qwen3-0.6B, to say what there is room for before a package is made."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes: weights and libraries, and the cache of one conversation of full length."""

    weights: int
    conversation: int


def needs_of(manifest: Manifest, context: int) -> Needs:
    """What serving needs at least, with the package's own type of cache."""
    spec = manifest.spec
    conversation = kv_bytes(spec, manifest.kv_types[0], context)
    return Needs(RUNTIME_BYTES + loaded_bytes(manifest), conversation)


def _resident_bytes(spec: ModelSpec, quant: Quant) -> int:
    return RUNTIME_BYTES + weights_bytes(spec, quant)


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
    needs = {quant: _resident_bytes(QWEN3, quant) for quant in QUANTS}
    if needs["int4"] > memory.most:
        text = f"even int4 of Qwen3-0.6B needs {size_text(needs['int4'])}, there are {size_text(memory.most)} in all"
        yield Finding("warning", "memory-too-small", text, "take a smaller model (SmolLM2-135M)")
    elif large := {quant: need for quant, need in needs.items() if need > memory.free}:
        listed = ", ".join(f"{quant} ({size_text(need)})" for quant, need in large.items())
        text = f"{size_text(memory.free)} are free: too little for Qwen3-0.6B as {listed}"
        yield Finding("note", "memory-scarce", text, "import with another --quant, or stop what takes the memory")


def fit_findings(path: Path, manifest: Manifest, processor: Processor) -> Iterator[Finding]:
    """Whether the weights have the form that this processor multiplies rightly and fastest."""
    depends = manifest.quant in ROW_QUANTS and manifest.graph == "own"
    if depends and manifest.weight_form == "signed" and processor.target == "any":
        yield Finding(
            "warning",
            "weight-form",
            f"{manifest.name} was made for processors with VNNI, which this is not",
            _remaking(path, "any"),
        )
    if depends and manifest.weight_form == "unsigned" and processor.target == "vnni":  # ARM's kernels are alike
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
