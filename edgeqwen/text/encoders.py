"""The encoders of one vocabulary, as the `tokenizers` library makes them: read from a file, let go, read again.

A large vocabulary takes 40 MB, more than half of what a daemon whose model sleeps has beside the interpreter. What is
known of it otherwise (the added tokens, how bytes are spelt) stays.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from edgeqwen.errors import ModelInvalid, ModelMissing


@dataclass(frozen=True, slots=True)
class Encoders:
    """`stock` knows the added tokens, to `plain` every string is text, and `inner` is that for text which does not
    begin the prompt.
    """

    stock: RustTokenizer
    plain: RustTokenizer
    inner: RustTokenizer

    @classmethod
    def of(cls, rust: RustTokenizer, *, file: str) -> Encoders:
        """All of one vocabulary, which they share. Raises `ModelInvalid` unless it is of the kind BPE."""
        if not isinstance(rust.model, models.BPE):
            kind = type(rust.model).__name__
            raise ModelInvalid(f"{file}: tokenizer model {kind} is not supported; only BPE is")
        # A file may carry the settings of somebody's training run, which would cut or fill prompts in silence.
        rust.no_truncation()
        rust.no_padding()
        plain = _without_added_tokens(rust)
        return cls(rust, plain, _without_prefix_space(plain))


class KeptEncoders:
    """Encoders that are there whenever they are asked for, from any thread; read again after `let_go`."""

    def __init__(self, encoders: Encoders, *, path: Path | None = None, digest: bytes = b"") -> None:
        """`path` is the file that they were read from, and `digest` that of its content; without one they stay."""
        self._encoders: Encoders | None = encoders
        self._path = path
        self._digest = digest
        self._lock = threading.Lock()

    def get(self) -> Encoders:
        """Raises `ModelMissing` or `ModelInvalid` if the file is not there any more, or not the one that it was."""
        encoders = self._encoders
        if encoders is not None:
            return encoders
        with self._lock:
            if self._encoders is None:
                self._encoders = self._read()
            return self._encoders

    def let_go(self) -> None:
        """Have nothing of them in memory until they are asked for."""
        if self._path is not None:
            with self._lock:
                self._encoders = None

    def _read(self) -> Encoders:
        assert self._path is not None
        data = read_file(self._path)
        if digest_of(data) != self._digest:
            raise ModelInvalid(f"{self._path}: is not the file any more that the daemon started with; restart it")
        return Encoders.of(parse(data, file=str(self._path)), file=str(self._path))


def read_file(path: Path) -> bytes:
    """The content of a tokenizer.json. Raises `ModelMissing` or `ModelInvalid`."""
    try:
        return path.read_bytes()
    except FileNotFoundError as e:
        raise ModelMissing(f"{path}: no such file; import the model again") from e
    except OSError as e:
        raise ModelInvalid(f"{path}: cannot be read ({e.strerror})") from e


def parse(data: bytes, *, file: str) -> RustTokenizer:
    """What the library makes of the content of a tokenizer.json; raises `ModelInvalid` that names `file`."""
    try:
        return RustTokenizer.from_str(data.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        # For what a broken file causes the library raises bare Exception, or panics, which is no Exception.
        raise ModelInvalid(f"{file}: is not a tokenizer.json of the tokenizers library") from e


def digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _without_added_tokens(stock: RustTokenizer) -> RustTokenizer:
    """The same model (shared, not copied) with no added tokens."""
    plain = RustTokenizer(stock.model)
    if stock.normalizer is not None:
        plain.normalizer = stock.normalizer
    if stock.pre_tokenizer is not None:
        plain.pre_tokenizer = stock.pre_tokenizer
    return plain


def _without_prefix_space(plain: RustTokenizer) -> RustTokenizer:
    """`plain` for text that does not begin the prompt: Metaspace's scheme "first" puts no space before such text."""
    if plain.pre_tokenizer is None:
        return plain
    state = bytes(plain.pre_tokenizer.__getstate__())
    changed = re.sub(rb'"prepend_scheme":\s*"first"', b'"prepend_scheme":"never"', state)
    if changed == state:
        return plain
    model = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "added_tokens": [], "pre_tokenizer": msgspec.Raw(changed), "model": model}
    inner = _without_added_tokens(plain)
    inner.pre_tokenizer = RustTokenizer.from_str(msgspec.json.encode(shell).decode()).pre_tokenizer
    return inner
