"""Which peers there are: what each needs, which forms of a model it runs, and with which settings.

A *form* is one way a peer stores weights; where a peer has a choice of *settings*, the better one counts, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TORCH: Final = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Form:
    """`file` is what the form's files are called behind the model's name. Forms of one `file` share it."""

    name: str
    file: str
    settings: tuple[str, ...] = ("default",)
    has_speed: bool = True
    has_quality: bool = True


@dataclass(frozen=True, slots=True)
class Peer:
    """`requirements` are pip's; `unwanted` packages come with them and break them, so they are removed again.

    What `is_compiled` here must not come out of pip's cache, where a build with other options may lie. `details` is an
    expression for the report: how the peer was built.
    """

    name: str
    requirements: tuple[str, ...]
    runner: str
    forms: tuple[Form, ...]
    unwanted: tuple[str, ...] = ()
    import_name: str = ""
    is_compiled: bool = False
    details: str = ""


LLAMA_SETTINGS: Final = ("plain", "flash")

PEERS: Final = (
    Peer(
        name="llama.cpp",
        requirements=("llama-cpp-python==0.3.36",),
        runner="llama_cpp",
        import_name="llama_cpp",
        is_compiled=True,
        details="llama_cpp.llama_print_system_info().decode()",
        forms=(
            Form("Q4_0", "Q4_0.gguf", LLAMA_SETTINGS),
            Form("Q4_K_M", "Q4_K_M.gguf", LLAMA_SETTINGS),
            Form("Q8_0", "Q8_0.gguf", LLAMA_SETTINGS),
            Form("Q6_K", "Q6_K.gguf", LLAMA_SETTINGS),
            Form("Q5_K_M", "Q5_K_M.gguf", LLAMA_SETTINGS, has_speed=False),
        ),
    ),
    Peer(
        name="openvino",
        requirements=(TORCH, "optimum-intel[openvino]==2.2.0", "openvino==2026.4.1", "nncf==3.4.0"),
        unwanted=("torchvision",),
        runner="openvino",
        import_name="openvino",
        forms=(
            Form("int4", "openvino-int4", ("bf16", "f32")),
            Form("int4 last", "openvino-int4", ("bf16-last", "f32-last"), has_quality=False),
        ),
    ),
    Peer(
        name="onnxruntime-genai",
        requirements=("onnxruntime-genai==0.18.0", "onnx_ir==1.1.0", TORCH, "transformers==5.24.0"),
        runner="genai",
        import_name="onnxruntime_genai",
        forms=(
            Form("int4", "genai-int4"),
            Form("int4 last", "genai-int4-last", has_quality=False),
        ),
    ),
    Peer(
        name="optimum",
        requirements=(TORCH, "optimum-onnx[onnxruntime]==0.1.0"),
        runner="optimum",
        import_name="optimum.onnxruntime",
        forms=(
            Form("fp32", "optimum-fp32", ("bound", "plain")),
            Form("int8", "optimum-int8", ("bound", "plain")),
        ),
    ),
    Peer(
        name="transformers",
        requirements=(TORCH, "transformers==5.24.0", "accelerate==1.15.0"),
        runner="transformers",
        import_name="transformers",
        forms=(Form("bf16", "", ("bf16",)),),
    ),
)


FORMS: Final = tuple(f"{peer.name} {form.name}" for peer in PEERS for form in peer.forms)
"""Labels of all forms."""


def peer_named(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)
