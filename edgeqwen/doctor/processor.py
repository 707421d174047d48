"""What the processor's instruction sets mean for each form of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgeqwen.cpu import Processor, missing_flags
from edgeqwen.doctor.finding import Finding
from edgeqwen.errors import EXIT_CONFIG


def quant_notes(processor: Processor) -> Mapping[str, str]:
    """How each quant is computed here."""
    int8, int4 = _integer_notes(processor)
    return {
        "int8": int8,
        "int4": int4,
        "hybrid": "decodes as int4, reads prompts as int8",
        "fp32": f"floats, {_float_set(processor)}",
    }


def _integer_notes(processor: Processor) -> tuple[str, str]:
    if processor.is_arm:
        dot = next((name for name in ("i8mm", "asimddp") if name in processor.flags), "")
        how = f"8-bit products by {dot}" if dot else "8-bit products without dot product instructions"
        return f"signed weights, {how}", how
    if processor.has_vnni:
        name = next(name for name in ("amx_int8", "avx512_vnni", "avx_vnni") if name in processor.flags)
        return f"signed weights, exact 8-bit products by {name}", "8-bit products by VNNI"
    wide = _float_set(processor)
    return f"unsigned weights, widened before they are multiplied ({wide}): exact, slower than VNNI", f"{wide}"


def _float_set(processor: Processor) -> str:
    if processor.is_arm:
        return "NEON"
    names = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}
    return next((name for flag, name in names.items() if flag in processor.flags), "SSE4")


def processor_findings(processor: Processor) -> Iterator[Finding]:
    """What the processor lacks."""
    if not processor.flags:
        yield Finding(
            "warning",
            "cpuinfo",
            "/proc/cpuinfo says nothing of this processor's instruction sets",
            "let the daemon read it (systemd: ProcSubset=all), or libraries may take their slowest kernels",
        )
    elif missing := missing_flags(processor):
        yield Finding(
            "error",
            "processor-too-old",
            f"the processor lacks {', '.join(missing)}, without which the native libraries do not run",
            _or_unmask(processor, "run edgeqwen on an x86 processor made after 2009, or on 64-bit ARM"),
            EXIT_CONFIG,
        )
    elif processor.is_x86 and "avx2" not in processor.flags:
        text = "the processor has no AVX2: all kernels are several times slower than with it"
        yield Finding("warning", "no-avx2", text, _or_unmask(processor, "choose a small model and short prompts"))
    elif processor.is_x86 and not processor.has_vnni:
        text = "the processor has no VNNI: 8-bit products take several instructions"
        advice = "import here, or with --target any, and compare int8 and int4 with `edgeqwen bench`"
        yield Finding("warning", "no-vnni", text, _or_unmask(processor, advice))
    elif processor.is_arm and "asimddp" not in processor.flags:
        text = "the processor has no dot product instructions (asimddp): 8-bit products are slow"
        yield Finding("warning", "no-dotprod", text, "compare int8 and int4 with `edgeqwen bench`")


def _or_unmask(processor: Processor, advice: str) -> str:
    """A virtual machine may lack only what its host hides."""
    hint = (
        "if the virtual machine's host has it, pass its CPU through (libvirt: host-passthrough; qemu: -cpu host); else "
    )
    return f"{hint}{advice}" if processor.is_virtual else advice
