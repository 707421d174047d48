"""The runtime on IPEX where IPEX is not installed: how it is refused. tests/compare_ipex.py computes with it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from edgeqwen.cpu import ThreadGroup, ThreadPlan
from edgeqwen.errors import ConfigInvalid
from edgeqwen.runtime.ipex import library, versions
from edgeqwen.runtime.torch.options import TorchOptions

FITTING = {"torch": "2.8.0+cpu", "intel-extension-for-pytorch": "2.8.0", "transformers": "4.51.3"}
OPTIONS = TorchOptions(threads=ThreadPlan(ThreadGroup(1), ThreadGroup(1)))


def install(monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, str]) -> None:
    """As if `packages` were all that is installed."""
    monkeypatch.setattr(versions, "installed_version", packages.get)


def test_versions_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FITTING)
    versions.check_versions()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch": None}, "torch not installed"),
        ({"intel-extension-for-pytorch": None}, "intel-extension-for-pytorch not installed"),
        ({"torch": None, "intel-extension-for-pytorch": None}, "torch and intel-extension-for-pytorch not installed"),
        ({"transformers": None}, "transformers not installed"),
        ({"torch": "2.13.0+cpu"}, "torch 2.13.0+cpu instead of 2.8"),
        ({"torch": "2.80.0"}, "torch 2.80.0 instead of 2.8"),
        ({"intel-extension-for-pytorch": "2.7.0+cpu"}, "intel-extension-for-pytorch 2.7.0+cpu instead of 2.8"),
    ],
)
def test_others_are_refused_in_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], said: str
) -> None:
    install(monkeypatch, {name: version for name, version in (FITTING | changed).items() if version is not None})
    with pytest.raises(ConfigInvalid) as caught:
        versions.check_versions()
    message = caught.value.message
    assert message.startswith(f"engine.runtime: {said}; in an environment of its own")
    assert "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0 transformers==4.51.3" in message
    assert "\n" not in message


def test_nothing_is_imported_before_versions_are_known_to_fit() -> None:
    program = (
        "import sys\n"
        "from edgeqwen.errors import ConfigInvalid\n"
        "from edgeqwen.runtime.ipex import versions\n"
        "versions.installed_version = {'torch': '2.13.0'}.get\n"
        "try:\n    versions.check_versions()\n"
        "except ConfigInvalid:\n    pass\n"
        "print(*{'torch', 'transformers', 'intel_extension_for_pytorch', 'onnxruntime'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not finished.stdout.strip()


def test_compiled_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_has_avx2", lambda: True)
    with pytest.raises(ConfigInvalid, match=r"torch\.mode: .*take eager"):
        library.check_options(TorchOptions(threads=OPTIONS.threads, mode="compile"))


def test_a_processor_without_avx2_is_refused_before_the_library_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "processor_has_avx2", lambda: False)
    with pytest.raises(ConfigInvalid, match="needs a processor with AVX2"):
        library.check_options(OPTIONS)


@pytest.mark.parametrize("failure", ["raise OSError('libtorch.so: no such file')", "import sys; sys.exit('no AVX2')"])
def test_a_library_that_cannot_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    (tmp_path / "broken_extension.py").write_text(failure)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "MODULE", "broken_extension")
    with pytest.raises(ConfigInvalid, match=r"broken_extension cannot be imported .*install it again") as caught:
        library.import_ipex()
    assert "\n" not in caught.value.message


def test_logging_is_as_it_was_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forward_extension.py").write_text(
        "import logging\n"
        "logging.root.addHandler(logging.NullHandler())\n"
        "logging.setLoggerClass(type('Own', (logging.Logger,), {}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "MODULE", "forward_extension")
    before = logging.getLoggerClass(), list(logging.root.handlers)
    library.import_ipex()
    assert (logging.getLoggerClass(), list(logging.root.handlers)) == before
