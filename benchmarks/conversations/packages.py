"""The models that conversations are had with: SmolLM2, and a package of Qwen3's shape that speaks as Qwen3 does."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import _smollm2
from benchmarks.peers.environments import CHECKOUT, run
from edgeqwen.core.model import KVType, Manifest
from edgeqwen.core.package import MANIFEST, TEMPLATE, TOKENIZER, file_digest, open_package
from edgeqwen.evaluate import built_in_texts
from edgeqwen.text import Tokenizer
from tests.qwen_files import DATA, qwen_tokenizer_path

CACHE: Final = CHECKOUT / ".cache" / "conversations"
BYTES: Final[dict[KVType, int]] = {"fp32": 4, "int8": 1}
MOST_FAVOURED: Final = 1000
FAVOUR: Final = 90.0
"""Added to a logit; those of random weights lie within a few of each other."""


def smollm2() -> Path:
    """A package of the real model in int8 (made once, without calibration)."""
    out = CACHE / "smollm2-int8"
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        source = str(_smollm2.find_source(CACHE))
        run([sys.executable, "-m", "edgeqwen", "import", source, "--quant", "int8", "--fast", "--out", str(out)])
    return out


def with_qwen3_text(package: Path, out: Path) -> Path:
    """The package with Qwen3's tokenizer and template in place of its own, and its other files by symbolic links."""
    out.mkdir(parents=True, exist_ok=True)
    manifest = open_package(package).manifest
    own = {TOKENIZER: qwen_tokenizer_path(), TEMPLATE: DATA / "qwen3_chat_template.jinja"}
    sources = {name: own.get(name, (package / name).resolve()) for name in manifest.sizes}
    for name, source in sources.items():
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(source)
    changed = msgspec.structs.replace(
        manifest,
        sizes=manifest.sizes | {name: os.stat(path).st_size for name, path in own.items()},
        digests=manifest.digests | {name: file_digest(path) for name, path in own.items()},
    )
    (out / MANIFEST).write_bytes(msgspec.json.encode(changed))
    return out


def token_bytes(manifest: Manifest, kv_type: KVType) -> int:
    """Bytes of cache that a token takes."""
    return manifest.spec.kv_floats_per_token * BYTES[kv_type]


@functools.cache
def english() -> tuple[str, ...]:
    """Words to make prompts of."""
    return tuple(built_in_texts()["english"].split())


def word_bias(package: Path) -> dict[str, float]:
    """`logit_bias` with which a model of random weights says whole words, so that its text is tokenised as it came."""
    tokenizer = Tokenizer.from_file(package / TOKENIZER)
    ids = (tokenizer.encode(f" {word}", special=False) for word in english() if word.isalpha())
    words = dict.fromkeys(each[0] for each in ids if len(each) == 1)
    return dict.fromkeys(map(str, list(words)[:MOST_FAVOURED]), FAVOUR)


def options_for(package: Path, *, is_random: bool) -> dict[str, Any]:
    """Members that go with every request; a model of random weights here is one that could think, and is not to."""
    return {"temperature": 0} | ({"think": False, "logit_bias": word_bias(package)} if is_random else {})
