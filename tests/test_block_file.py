"""The format of one block on disk: what was written comes back, and nothing else is believed."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgeqwen.kvcache.block_file import (
    MAGIC,
    MAX_FINGERPRINT,
    MAX_HEAD_BYTES,
    MAX_OWNER,
    MAX_START_BYTES,
    MAX_TOKENS,
    VERSION,
    BlockDamaged,
    BlockHead,
    block_name,
    check_data,
    decode,
    decode_start,
    encode,
    file_bytes,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
token_ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=MAX_TOKENS).map(tuple)
PARENT = "0123456789abcdef" * 2


def head_of(
    ids: tuple[int, ...], num_bytes: int, start: int = 0, owner: str = "uid:1000", fingerprint: str = "tiny|int8|kv8|3"
) -> BlockHead:
    parent = PARENT if start else ""
    name = block_name(parent, owner, ids, fingerprint)
    return BlockHead(fingerprint, owner, name, parent, start, ids, num_bytes)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockHead, bytes]:
    data = draw(st.binary(min_size=1, max_size=200))
    start = draw(st.sampled_from([0, 64, 2**32 - 1]))
    return head_of(draw(token_ids), len(data), start, draw(texts), draw(texts)), data


def file_of(head: BlockHead, data: bytes) -> bytes:
    return b"".join(encode(head, data))


def with_head(packed: bytes, data: bytes, version: int = VERSION) -> bytes:
    """A file around any bytes for a head, with lengths and checksums as they should be."""
    prefix = struct.pack("<8sIII", MAGIC, version, len(packed), zlib.crc32(data))
    return prefix + struct.pack("<I", zlib.crc32(prefix + packed)) + packed + data


SMALL = head_of((1, 2, 3), 5), b"data!"


@given(blocks())
def test_a_block_comes_back_as_it_was_written(block: tuple[BlockHead, bytes]) -> None:
    head, data = block
    file = file_of(head, data)
    assert len(file) == file_bytes(head)
    found, found_data = decode(file)
    assert found == head
    assert bytes(found_data) == data


def test_the_start_of_a_file_is_enough_for_the_longest_head() -> None:
    data = bytes(2 * MAX_START_BYTES)
    head = head_of((2**32 - 1,) * MAX_TOKENS, len(data), 64, "\U0001f600" * MAX_OWNER, "\U0001f600" * MAX_FINGERPRINT)
    file = file_of(head, data)
    start = decode_start(file[:MAX_START_BYTES], len(file))
    assert start.head == head
    check_data(start, file[start.data_offset :])


def test_arrays_are_written_without_a_copy() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    head = head_of((7,), values.nbytes)
    _, view = encode(head, values.data)
    values[0, 0] = 5
    assert bytes(view) == values.tobytes()


@given(blocks(), st.data())
def test_a_truncated_file_is_damaged(block: tuple[BlockHead, bytes], data: st.DataObject) -> None:
    file = file_of(*block)
    with pytest.raises(BlockDamaged):
        decode(file[: data.draw(st.integers(0, len(file) - 1))])


@given(blocks(), st.binary(min_size=1, max_size=50))
def test_a_file_longer_than_its_head_says_is_damaged(block: tuple[BlockHead, bytes], extra: bytes) -> None:
    with pytest.raises(BlockDamaged):
        decode(file_of(*block) + extra)


def test_any_changed_byte_is_noticed() -> None:
    file = file_of(*SMALL)
    for position in range(len(file)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(file)
            damaged[position] ^= change
            with pytest.raises(BlockDamaged):
                decode(damaged)


def test_every_truncation_of_a_start_is_noticed() -> None:
    file = file_of(*SMALL)
    for size in range(decode_start(file, len(file)).data_offset):
        with pytest.raises(BlockDamaged):
            decode_start(file[:size], len(file))


@given(st.binary(max_size=300))
def test_any_bytes_at_all_are_damaged_and_nothing_worse(file: bytes) -> None:
    with pytest.raises(BlockDamaged):
        decode(file)


def test_zeros_as_a_power_cut_leaves_them_are_damaged() -> None:
    for size in (0, 1, 24, 4096, 100_000):
        with pytest.raises(BlockDamaged):
            decode(bytes(size))


@given(st.binary(max_size=200))
def test_any_bytes_for_a_head_with_a_right_checksum_are_damaged_and_nothing_worse(packed: bytes) -> None:
    with pytest.raises(BlockDamaged):
        decode(with_head(packed, b"data!"))


GOOD = msgspec.to_builtins(SMALL[0])


@pytest.mark.parametrize(
    "change",
    [
        {"ids": []},
        {"ids": [1] * (MAX_TOKENS + 1)},
        {"ids": [1, 2, -1]},
        {"ids": [1, 2, 2**32]},
        {"ids": [1, 2, 3.5]},
        {"ids": [1, 2, 4]},
        {"ids": "abc"},
        {"start": -1},
        {"start": 64},
        {"start": 2**32},
        {"num_bytes": 0},
        {"num_bytes": -5},
        {"num_bytes": 6},
        {"num_bytes": 2**70},
        {"owner": "uid:1001"},
        {"owner": "x" * (MAX_OWNER + 1)},
        {"owner": None},
        {"fingerprint": "tiny|int8|kv8|4"},
        {"fingerprint": "x" * (MAX_FINGERPRINT + 1)},
        {"parent": PARENT},
        {"parent": "../../etc"},
        {"name": PARENT},
        {"name": "../" * 10 + "xy"},
        {"name": GOOD["name"].upper()},
        {"name": GOOD["name"] + "\n"},
    ],
)
def test_a_head_with_one_wrong_member_is_damaged(change: dict[str, object]) -> None:
    packed = msgspec.msgpack.encode(GOOD)
    assert decode(with_head(packed, b"data!"))[0] == SMALL[0], "the unchanged head is a good one"
    changed = GOOD | change
    assert changed != GOOD
    with pytest.raises(BlockDamaged):
        decode(with_head(_pack(changed), b"data!"))


def _pack(values: dict[str, object]) -> bytes:
    try:
        return msgspec.msgpack.encode(values)
    except OverflowError:  # MessagePack has no such integer; a float of the size says the same
        return msgspec.msgpack.encode(values | {"num_bytes": 2.0**70})


@pytest.mark.parametrize("name", list(GOOD))
def test_a_head_without_one_of_its_members_is_damaged(name: str) -> None:
    packed = msgspec.msgpack.encode({key: value for key, value in GOOD.items() if key != name})
    with pytest.raises(BlockDamaged):
        decode(with_head(packed, b"data!"))


def test_a_deeply_nested_head_is_damaged_and_does_not_exhaust_the_stack() -> None:
    packed = b"\x81\xa1x" + b"\x91" * (MAX_HEAD_BYTES - 4) + b"\x00"
    with pytest.raises(BlockDamaged):
        decode(with_head(packed, b"data!"))


def test_a_file_of_another_version_is_damaged() -> None:
    packed = msgspec.msgpack.encode(GOOD)
    with pytest.raises(BlockDamaged, match="version"):
        decode(with_head(packed, b"data!", version=VERSION + 1))


def test_a_head_longer_than_allowed_is_damaged_even_if_it_is_all_there() -> None:
    packed = msgspec.msgpack.encode(GOOD | {"more": "x" * MAX_HEAD_BYTES})
    with pytest.raises(BlockDamaged, match="head"):
        decode(with_head(packed, b"data!"))


def test_data_of_another_length_do_not_pass_for_those_of_a_start() -> None:
    file = file_of(*SMALL)
    start = decode_start(file, len(file))
    for data in (b"", b"data", b"data!!"):
        with pytest.raises(BlockDamaged, match="5"):
            check_data(start, data)


def test_what_is_not_a_block_is_not_written() -> None:
    head, data = SMALL
    for wrong in (
        dataclasses.replace(head, name=PARENT),
        dataclasses.replace(head, start=64),
        dataclasses.replace(head, num_bytes=4),
        head_of((1,) * (MAX_TOKENS + 1), 5),
        head_of((1,), 5, owner="x" * (MAX_OWNER + 1)),
        head_of((1,), 5, fingerprint="x" * (MAX_FINGERPRINT + 1)),
    ):
        with pytest.raises(AssertionError):
            encode(wrong, data)


names = st.tuples(st.sampled_from(["", PARENT]), texts, token_ids, texts)


@given(names, names)
def test_different_blocks_have_different_names(
    one: tuple[str, str, tuple[int, ...], str], other: tuple[str, str, tuple[int, ...], str]
) -> None:
    assume(one != other)
    assert block_name(*one) != block_name(*other)


def test_each_part_of_a_block_changes_its_name() -> None:
    parts: list[tuple[str, str, tuple[int, ...], str]] = [
        ("", "uid:1000", (1, 2), "tiny"),
        (PARENT, "uid:1000", (1, 2), "tiny"),
        (PARENT[::-1], "uid:1000", (1, 2), "tiny"),
        ("", "uid:1001", (1, 2), "tiny"),
        ("", "uid:1000", (2, 1), "tiny"),
        ("", "uid:1000", (1, 2, 0), "tiny"),
        ("", "uid:1000", (1, 2), "tinz"),
    ]
    assert len({block_name(*each) for each in parts}) == len(parts)


def test_moving_bytes_between_the_parts_of_a_name_changes_it() -> None:
    assert len({block_name("", owner, (1,), text) for owner, text in [("ab", ""), ("a", "b"), ("", "ab")]}) == 3
    word = struct.pack("=I", 0x61616161).decode()
    assert block_name("", word, (1,), "") != block_name("", "", (0x61616161, 1), "")


def test_a_name_is_the_same_in_every_process() -> None:
    name = block_name("", "uid:1000", (1, 2, 3), "tiny")
    assert name == block_name("", "uid:1000", (1, 2, 3), "tiny")
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")
