"""A long batch leaves the daemon as large as it was: `scripts/soak batch`, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import batch


def test_a_batch_of_five_megabytes_leaves_the_daemon_as_large_as_it_was(tmp_path: Path) -> None:
    found = batch.run(tmp_path, batch.Size(num_items=1000, most_growth_mb=10.0))
    assert found["body_mb"] > 5


def test_growth_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="growth_mb"):
        batch.run(tmp_path, batch.Size(num_items=100, most_growth_mb=0.0))
