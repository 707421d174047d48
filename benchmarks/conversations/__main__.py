"""Conversations that come back: what is computed again, what it costs to have it back, and who waits for whom.

    scripts/benchmark conversations [--package PACKAGE [--random]] [--kv fp32|int8] [--only FIGURES] [--samples 5]

Without a package: SmolLM2-135M-Instruct in int8. `--random` says that a package is of Qwen3's shape with random
weights (`python -m benchmarks._standin`): it is given Qwen3's tokenizer and template, and says words in no order.

* `second`: tokens computed for a turn after 1,500 tokens of history.
* `resume`: extra time to the first token of such a turn, over as many new tokens without a history, alternating; the
  history is in memory, in files that the page cache holds after a restart, and in files that were dropped from it.
* `robin`: ten sessions of 1,000 tokens in turns, memory for three.
* `shared`: a system prompt of 600 tokens that two clients have in common; a client of another user.
* `streams`: the longest gap of three streams while a prompt of 3,000 tokens is computed.
* `behind`: time to the first token of a short prompt behind one of 7,000 tokens, and alone, alternating.

A JSON line for each figure; times are medians. Where `holds` is false a promise is broken, and the exit code is 1.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.conversations import packages, reuse, waiting
from benchmarks.conversations.setup import Setup
from edgeqwen.core.package import open_package

FIGURES: Final[dict[str, Callable[[Setup], None]]] = {
    "second": reuse.second_turn,
    "resume": reuse.resume,
    "robin": reuse.round_robin,
    "shared": reuse.shared_system,
    "streams": waiting.long_prompt_beside_streams,
    "behind": waiting.short_behind_long,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path)
    parser.add_argument("--random", action="store_true", help="of Qwen3's shape with random weights")
    parser.add_argument("--kv", choices=("fp32", "int8"), help="default: the package's own")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(FIGURES), metavar="FIGURES")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if unknown := set(given.only) - FIGURES.keys():
        parser.error(f"no such figures: {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    with tempfile.TemporaryDirectory(prefix="conversations-") as name:
        package = given.package or packages.smollm2()
        if given.random:
            package = packages.with_qwen3_text(package, Path(name) / package.name)
        setup = make_setup(package, given, Path(name) / "profiles")
        for figure in given.only:
            FIGURES[figure](setup)
    return 1 if setup.broken else 0


def make_setup(package: Path, given: argparse.Namespace, profiles: Path) -> Setup:
    """What the flags ask for; a first daemon measures the machine."""
    manifest = open_package(package).manifest
    kv_type = given.kv or manifest.kv_types[0]
    setup = Setup(
        package=package,
        kv_type=kv_type,
        token_bytes=packages.token_bytes(manifest, kv_type),
        options=packages.options_for(package, is_random=given.random),
        rerenders=given.random,
        samples=given.samples,
        threads=given.threads,
        profiles=profiles,
    )
    profiles.mkdir()
    with setup.daemon(profiles):
        return setup


if __name__ == "__main__":
    sys.exit(main())
