"""A runtime on intel-extension-for-pytorch (IPEX): the torch runtime with IPEX's products and fused operators.

    versions   which torch and IPEX go together, known without importing either
    library    IPEX itself: its import, and what it needs of the machine
    matrices   weights packed for its products: bf16, or codes of 8 bits
    attention  its paged attention over our arenas
    decoder    a layer of its fused operators, and the runtime that has all of these

IPEX serves a model as a whole through `ipex.llm.optimize`, which puts the same operators into transformers' model. Its
forward pass is not used: it computes a prompt or one more token, and several tokens after a past come out wrong, so
that neither chunks of a prompt nor a prefix that is known could be had; and matrices as it packs them (TPP) take longer
than the same library's oneDNN ones.

Nothing here is imported unless ipex is what the configuration names; `versions` alone may be.
"""

from __future__ import annotations

from edgeqwen.runtime.ipex.library import load_ipex

__all__ = ["load_ipex"]
