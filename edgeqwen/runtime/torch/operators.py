"""Operators of the decoder that torch's compiler takes as they are: it fuses what stands between them.

Packed weights have layouts of oneDNN's own, and a step's attention has as many shapes as there are conversations: a
compiler that looked into either would make new code for every layer and length. So a layer is compiled once, and what
differs between layers is looked up by the layer's number. That is a tensor, since a number would be built into the
code.

Operators are global in torch; whose weights and cache they use is set for the time of a step (`executing`). Steps are
run by one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch

NAMESPACE: Final = "edgeqwen"


class Executor(Protocol):
    """What the operators do their work with. `layer` and `part` say which matrix."""

    def product(self, rows: Any, layer: int, part: int) -> Any:
        """Rows `[rows, in]` times a matrix: `[rows, out]`, of the executor's type."""
        ...

    def attend(self, query: Any, key: Any, value: Any, layer: int) -> Any:
        """Append keys and values `[rows, kv_heads, head_dim]` to the cache, and attend to it: `[rows, heads *
        head_dim]`.
        """
        ...


_executors: list[Executor] = []
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("product(Tensor rows, Tensor layer, int part, int width, ScalarType dtype) -> Tensor")
_library.define("attend(Tensor query, Tensor key, Tensor value, Tensor layer) -> Tensor")


@contextlib.contextmanager
def executing(executor: Executor) -> Iterator[None]:
    """The operators work for `executor` inside."""
    _executors.append(executor)
    try:
        yield
    finally:
        _executors.pop()


def _product(rows: Any, layer: Any, part: int, width: int, dtype: Any) -> Any:
    return _executors[-1].product(rows, int(layer), part)


def _product_shape(rows: Any, layer: Any, part: int, width: int, dtype: Any) -> Any:
    return rows.new_empty((rows.shape[0], width), dtype=dtype)


def _attend(query: Any, key: Any, value: Any, layer: Any) -> Any:
    return _executors[-1].attend(query, key, value, int(layer))


def _attend_shape(query: Any, key: Any, value: Any, layer: Any) -> Any:
    return query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))


_library.impl("product", _product, "CPU")
_library.impl("attend", _attend, "CPU")
_library.impl("product", _product_shape, "Meta")
_library.impl("attend", _attend_shape, "Meta")

product = torch.ops.edgeqwen.product.default
attend = torch.ops.edgeqwen.attend.default
