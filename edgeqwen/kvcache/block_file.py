"""One block of the KV cache as the bytes of a file.

    offset  0  magic       8 bytes
            8  version     u32      all numbers little-endian
           12  head length u32      at most `MAX_HEAD_BYTES`
           16  data CRC-32 u32
           20  head CRC-32 u32      of everything before it and of the head
           24  head                 `BlockHead` as MessagePack
               data                 to the end of the file

A file is believed only as a whole. Files are replaced by renaming and never synced, so after a power cut one may be
short, empty or filled with zeros, and a flash card may give back other bytes than it was given. Both checksums, both
lengths and the name have to agree; else the block is a miss, which costs computing it again and nothing more.

A name is a hash chain: it covers the name of the block before it, hence all tokens from position 0 on, which is what
keys and values depend on. It covers the model (the fingerprint) and the owner too, so a block of another model or of
another user cannot be found by accident, and a file moved to another name is found out. Checksums catch accidents, not
forgers: who may write into the folder is trusted.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_TOKENS: Final = 64
MAX_FINGERPRINT: Final = 128
MAX_OWNER: Final = 256
MAX_HEAD_BYTES: Final = 4096

MAGIC: Final = b"eqkvblok"
VERSION: Final = 1
_PREFIX: Final = struct.Struct("<8sIIII")
_CHECKSUM: Final = struct.Struct("<I")
_LENGTHS: Final = struct.Struct("<HHH")

MAX_START_BYTES: Final = _PREFIX.size + MAX_HEAD_BYTES
"""So many bytes from the start of a file always hold its whole head."""


class BlockDamaged(Exception):
    """Bytes that are not a whole, consistent block; the message says in what way."""


@dataclass(frozen=True, slots=True)
class BlockHead:
    """What a block holds: the keys and values of `ids` at the positions from `start` on, `num_bytes` of them.

    `fingerprint` tells which model, quantisation, cache type and builder version computed them. `name` is
    `block_name` of the other members, `parent` the name of the block that ends at `start`; the first has none ("").
    """

    fingerprint: Annotated[str, Meta(max_length=MAX_FINGERPRINT)]
    owner: Annotated[str, Meta(max_length=MAX_OWNER)]
    name: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    parent: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")]
    start: Annotated[int, Meta(ge=0, lt=1 << 32)]
    ids: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(min_length=1, max_length=MAX_TOKENS)]
    num_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]


@dataclass(frozen=True, slots=True)
class BlockStart:
    """The start of a file, understood: where its data begin, in bytes, and the CRC-32 that they must have."""

    head: BlockHead
    data_offset: int
    data_checksum: int


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(BlockHead)


def block_name(parent: str, owner: str, ids: tuple[int, ...], fingerprint: str) -> str:
    """The name of the block of `ids` after the block `parent` ("" for none): 32 hexadecimal digits.

    The lengths of the texts come first, so no two different arguments are the same bytes. Token ids are taken in the
    byte order of the machine, as the data are: a folder carried to a machine of the other order is one of misses.
    """
    texts = fingerprint.encode(), owner.encode(), parent.encode()
    parts = (_LENGTHS.pack(*map(len, texts)), *texts, array("I", ids).tobytes())
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


def encode(head: BlockHead, data: Buffer) -> tuple[bytes, memoryview]:
    """The bytes of the file in two pieces; the second is `data` itself, not a copy."""
    view = memoryview(data).cast("B")
    assert 1 <= len(head.ids) <= MAX_TOKENS, f"{len(head.ids)} tokens in a block"
    assert len(head.fingerprint) <= MAX_FINGERPRINT, f"{len(head.fingerprint)} characters of fingerprint"
    assert len(head.owner) <= MAX_OWNER, f"{len(head.owner)} characters of owner"
    assert (head.start == 0) == (head.parent == ""), f"parent {head.parent!r} of a block that starts at {head.start}"
    assert head.name == block_name(head.parent, head.owner, head.ids, head.fingerprint), "not the block's name"
    assert head.num_bytes == len(view) > 0, f"{len(view)} bytes of data, {head.num_bytes} in the head"
    packed = _encoder.encode(head)
    assert len(packed) <= MAX_HEAD_BYTES, f"a head of {len(packed)} bytes"
    data_checksum = zlib.crc32(view)
    prefix = _PREFIX.pack(MAGIC, VERSION, len(packed), data_checksum, 0)[: -_CHECKSUM.size]
    return prefix + _CHECKSUM.pack(_head_checksum(prefix, packed)) + packed, view


def file_bytes(head: BlockHead) -> int:
    """The size of the whole file of a block."""
    return _PREFIX.size + len(_encoder.encode(head)) + head.num_bytes


def decode_start(start: Buffer, num_file_bytes: int) -> BlockStart:
    """Understand the first bytes of a file of `num_file_bytes` bytes: `MAX_START_BYTES` of them, or all if it is
    shorter. Raises `BlockDamaged` for anything that `encode` would not have written.
    """
    if len(start) < _PREFIX.size:
        raise BlockDamaged(f"{len(start)} bytes are no block")
    magic, version, num_head_bytes, data_checksum, head_checksum = _PREFIX.unpack_from(start)
    if magic != MAGIC or version != VERSION:
        raise BlockDamaged("not a block of this version")
    data_offset = _PREFIX.size + num_head_bytes
    if data_offset > len(start):
        raise BlockDamaged("cut off in its head")
    view = memoryview(start)
    packed = view[_PREFIX.size : data_offset]
    if _head_checksum(view[: _PREFIX.size - _CHECKSUM.size], packed) != head_checksum:
        raise BlockDamaged("checksum of the head")
    head = _decode_head(packed)
    if data_offset + head.num_bytes != num_file_bytes:
        raise BlockDamaged(f"{num_file_bytes} bytes instead of {data_offset + head.num_bytes}")
    return BlockStart(head, data_offset, data_checksum)


def check_data(start: BlockStart, data: Buffer) -> None:
    """Raise `BlockDamaged` unless `data` are what was written with this start."""
    if len(data) != start.head.num_bytes:
        raise BlockDamaged(f"{len(data)} bytes of data instead of {start.head.num_bytes}")
    if zlib.crc32(data) != start.data_checksum:
        raise BlockDamaged("checksum of the data")


def decode(file: Buffer) -> tuple[BlockHead, memoryview]:
    """Head and data of the bytes of a whole file; `BlockDamaged` if anything is wrong with them."""
    view = memoryview(file)
    start = decode_start(view[:MAX_START_BYTES], len(view))
    data = view[start.data_offset :]
    check_data(start, data)
    return start.head, data


def _head_checksum(prefix: Buffer, packed: Buffer) -> int:
    return zlib.crc32(packed, zlib.crc32(prefix))


def _decode_head(packed: Buffer) -> BlockHead:
    try:
        head = _decoder.decode(packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BlockDamaged(f"head: {error}") from error
    if (head.start == 0) != (head.parent == ""):
        raise BlockDamaged("the first block alone has no parent")
    if head.name != block_name(head.parent, head.owner, head.ids, head.fingerprint):
        raise BlockDamaged("its name is another block's")
    return head
