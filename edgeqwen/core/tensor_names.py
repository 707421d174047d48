"""Canonical names of a model's tensors (those of transformers), whatever its checkpoint calls them."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

EMBEDDING: Final = "model.embed_tokens.weight"
OUTPUT: Final = "lm_head.weight"
FINAL_NORM: Final = "model.norm.weight"
OUTPUT_TURN: Final = "model.norm.turn.weight"
"""`[hidden, hidden]`, times what leaves the final norm; only a rotated checkpoint has it."""

HIDDEN_TURN: Final = "model.norm.hidden_turn.weight"
"""`[hidden, hidden]`, times what leaves a rotated checkpoint's final norm is what leaves the model's own."""

StepName: TypeAlias = Literal["qkv", "o", "gate_up", "down"]

STEP_TENSORS: Final[dict[StepName, tuple[str, ...]]] = {
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "o": ("self_attn.o_proj.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
"""Linear layers of each step of a layer, which multiply one input; in the order in which their outputs stand side by
side.
"""


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."
