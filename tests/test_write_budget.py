"""The daily budget of bytes written: it survives restarts, and in doubt it is spent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeqwen.kvcache.write_budget import FILE_NAME, WriteBudget


class Calendar:
    """Today, as a test wants it."""

    def __init__(self) -> None:
        self.day = 100

    def __call__(self) -> int:
        return self.day


@pytest.fixture
def today() -> Calendar:
    return Calendar()


@pytest.fixture
def folder_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def reopened(budget: WriteBudget, folder_fd: int, today: Calendar) -> WriteBudget:
    budget.close()
    return WriteBudget(folder_fd, budget.daily_bytes, today)


def test_bytes_are_counted_up_to_the_budget_and_not_beyond(folder_fd: int, today: Calendar) -> None:
    budget = WriteBudget(folder_fd, 100, today)
    assert budget.spend(60)
    assert not budget.spend(41)
    assert (budget.written_bytes, budget.left_bytes) == (60, 40), "a refusal counts nothing"
    assert budget.spend(40)
    assert budget.left_bytes == 0
    budget.close()


def test_a_restart_does_not_refill_it_and_a_new_day_does(folder_fd: int, today: Calendar) -> None:
    budget = WriteBudget(folder_fd, 100, today)
    assert budget.spend(60)
    budget = reopened(budget, folder_fd, today)
    assert budget.left_bytes == 40
    today.day += 1
    assert budget.left_bytes == 100
    assert budget.spend(10)
    budget = reopened(budget, folder_fd, today)
    assert budget.written_bytes == 10
    today.day += 1
    assert reopened(budget, folder_fd, today).written_bytes == 0


def test_the_count_is_on_disk_before_bytes_are_written(folder_fd: int, today: Calendar) -> None:
    budget = WriteBudget(folder_fd, 100, today)
    assert budget.spend(60)
    killed_before_it_could_close = WriteBudget(folder_fd, 100, today)
    assert killed_before_it_could_close.written_bytes == 60
    killed_before_it_could_close.close()
    budget.close()


def test_a_clock_set_back_does_not_refill_it_and_a_wrong_date_ahead_is_not_waited_for(
    folder_fd: int, today: Calendar
) -> None:
    today.day = 50_000
    budget = WriteBudget(folder_fd, 100, today)
    assert budget.spend(90)
    today.day = 200
    assert budget.left_bytes == 10
    assert budget.spend(10)
    budget = reopened(budget, folder_fd, today)
    assert budget.left_bytes == 0
    today.day = 201
    assert budget.left_bytes == 100
    budget.close()


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        bytes(64),
        b"{",
        b'{"day":100}',
        b'{"day":100,"num_bytes":-5}',
        b'{"day":100,"num_bytes":1e3}',
        b'{"day":"100","num_bytes":1}',
        b'{"day":100,"num_bytes":1,"more":1}',
        b"\xff" * 64,
        b'{"day":100,"num_bytes":1}' + b"x" * 1000,
        b"[" * 128,
    ],
)
def test_a_count_that_cannot_be_read_is_a_spent_budget_until_tomorrow(
    tmp_path: Path, folder_fd: int, today: Calendar, damaged: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(damaged)
    budget = WriteBudget(folder_fd, 100, today)
    assert budget.left_bytes == 0
    assert not budget.spend(1)
    budget = reopened(budget, folder_fd, today)
    assert budget.left_bytes == 0
    today.day += 1
    assert budget.spend(70)
    assert reopened(budget, folder_fd, today).written_bytes == 70, "the file is a good one again"


def test_the_largest_numbers_fit_into_the_file(tmp_path: Path, folder_fd: int, today: Calendar) -> None:
    today.day = -(2**63) + 1
    budget = WriteBudget(folder_fd, 2**63 - 1, today)
    assert budget.spend(2**63 - 1)
    assert reopened(budget, folder_fd, today).left_bytes == 0
    assert (tmp_path / FILE_NAME).stat().st_size == 64


def test_what_another_folder_was_written_today_is_taken_over(tmp_path: Path, folder_fd: int, today: Calendar) -> None:
    other = tmp_path / "other"
    other.mkdir()
    other_fd = os.open(other, os.O_RDONLY | os.O_DIRECTORY)
    budget = WriteBudget(folder_fd, 100, today)
    budget.take_over(other_fd)
    assert budget.written_bytes == 0, "nothing was written there"
    written = WriteBudget(other_fd, 1000, today)
    assert written.spend(30)
    written.close()
    budget.take_over(other_fd)
    assert reopened(budget, folder_fd, today).written_bytes == 30
    today.day += 1
    budget = WriteBudget(folder_fd, 100, today)
    budget.take_over(other_fd)
    assert budget.written_bytes == 0, "that was yesterday"
    (other / FILE_NAME).write_bytes(b"")
    budget.take_over(other_fd)
    assert budget.left_bytes == 0
    budget.close()
    os.close(other_fd)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path, folder_fd: int, today: Calendar) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (tmp_path / FILE_NAME).symlink_to(target)
    with pytest.raises(OSError):
        WriteBudget(folder_fd, 100, today)
    assert target.read_bytes() == b"precious"
