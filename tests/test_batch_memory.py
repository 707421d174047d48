"""A long batch leaves the daemon as large as it was: `scripts/soak batch`, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import batch


def test_a_batch_of_five_megabytes_lets_a_daemon_that_has_just_loaded_grow_within_bounds(tmp_path: Path) -> None:
    found = batch.run(tmp_path, batch.Size(num_items=1000))
    assert found["body_mb"] > 5


@pytest.mark.parametrize(
    "size",
    [batch.Size(num_items=100, most_growth_mb=0.0), batch.Size(num_items=100, most_later_growth_mb=0.0)],
)
def test_growth_would_be_seen(tmp_path: Path, size: batch.Size) -> None:
    with pytest.raises(AssertionError, match="growth_mb"):
        batch.run(tmp_path, size)
