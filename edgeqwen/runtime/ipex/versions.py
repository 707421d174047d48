"""Which torch and IPEX go together. IPEX's last release works with torch 2.8 alone and fails, in words of its own, in a
process with another; so versions are compared before anything is imported.
"""

from __future__ import annotations

from typing import Final

from edgeqwen.errors import ConfigInvalid
from edgeqwen.runtime.torch.options import installed_version

IPEX: Final = "intel-extension-for-pytorch"
SERIES: Final = "2.8"
"""Of torch and IPEX both."""

TRANSFORMERS: Final = "4.51.3"
"""IPEX imports transformers; this is the newest version that it was tried with by its makers."""

REQUIREMENTS: Final = (f"torch=={SERIES}.0", f"{IPEX}=={SERIES}.0", f"transformers=={TRANSFORMERS}")
ADVICE: Final = (
    f"in an environment of its own, beside edgeqwen, `pip install {' '.join(REQUIREMENTS)}`; or take --runtime onnx"
)


def check_versions() -> None:
    """Raise `ConfigInvalid`, in one line that says what to install, if torch or IPEX is not there or not of the right
    version.
    """
    found = {name: installed_version(name) for name in ("torch", IPEX, "transformers")}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        raise ConfigInvalid(f"engine.runtime: {' and '.join(missing)} not installed; {ADVICE}")
    wrong = [f"{name} {found[name]}" for name in ("torch", IPEX) if not _is_of_series(found[name] or "")]
    if wrong:
        raise ConfigInvalid(f"engine.runtime: {' and '.join(wrong)} instead of {SERIES}; {ADVICE}")


def _is_of_series(version: str) -> bool:
    """`2.8.0+cpu` is."""
    return version.split("+", maxsplit=1)[0].split(".")[:2] == SERIES.split(".")
