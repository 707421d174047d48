"""What `auto` picks, by the memory there is."""

from __future__ import annotations

import pytest

from edgeqwen.core.fit import choose_kv_type, choose_quant, weights_bytes
from edgeqwen.core.model import Quant
from edgeqwen.doctor.package import QWEN3

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("free_gb", "quant"), [(24, "hybrid"), (3, "hybrid"), (2, "int8"), (1.6, "int8"), (1, "int4"), (0.3, "int4")]
)
def test_the_fastest_form_that_fits_in_half_of_the_free_memory_is_taken(free_gb: float, quant: Quant) -> None:
    assert choose_quant(QWEN3, free_bytes=int(free_gb * GB))[0] == quant


def test_unknown_memory_means_the_default() -> None:
    assert choose_quant(QWEN3, free_bytes=0)[0] == "int8"


def test_the_reason_names_both_numbers() -> None:
    reason = choose_quant(QWEN3, free_bytes=GB)[1]
    assert f"{weights_bytes(QWEN3, 'int8') / 1e6:.0f} MB" in reason
    assert "1000 MB" in reason


def test_a_cache_that_does_not_fit_in_floats_is_kept_in_bytes() -> None:
    one_slot = 229_376 * 8192
    assert choose_kv_type(QWEN3, ("fp32", "int8"), num_tokens=8 * 8192, free_bytes=8 * one_slot)[0] == "int8"
    assert choose_kv_type(QWEN3, ("fp32", "int8"), num_tokens=8 * 8192, free_bytes=20 * one_slot)[0] == "fp32"


def test_a_package_keeps_its_own_type_where_there_is_no_other_or_it_is_small() -> None:
    assert choose_kv_type(QWEN3, ("fp32",), num_tokens=8 * 8192, free_bytes=GB)[0] == "fp32"
    assert choose_kv_type(QWEN3, ("int8", "fp32"), num_tokens=8 * 8192, free_bytes=100 * GB)[0] == "int8"
    assert choose_kv_type(QWEN3, ("fp32", "int8"), num_tokens=8 * 8192, free_bytes=0)[0] == "fp32"
