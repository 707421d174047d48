"""The layers of docs/architecture.md: imports go downwards only, and nothing imports the heavy frameworks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "edgeqwen"

LEVELS: dict[str, int] = {
    "errors": 0,
    "metrics": 0,
    "logs": 0,
    "data": 0,
    "core": 1,
    "config": 1,
    "cpu": 1,
    "text": 1,
    "kvcache": 1,
    "constrain": 2,
    "protocol": 2,
    "sampling": 2,
    "scheduler": 2,
    "runtime": 2,
    "client": 3,
    "engine": 3,
    "sessions": 4,
    "server": 5,
    "http": 5,
    "fitting": 5,
    "loading": 6,
    "daemon": 6,
    "service": 6,
    "part_settings": 6,
    "reload": 6,
    "hangup": 6,
    "idle": 6,
    "stop": 6,
    "doors": 6,
    "request_log": 6,
    "cli": 7,
    "evaluate": 7,
    "bench": 7,
    "doctor": 7,
    "__main__": 8,
}
"""Part -> level. A part imports parts of lower levels; within a level only what `ALLOWED_BESIDE` names."""

ALLOWED_BESIDE: set[tuple[str, str]] = {
    ("logs", "errors"),
    ("config", "core"),
    ("cpu", "core"),
    ("text", "core"),
    ("kvcache", "core"),
    ("scheduler", "sampling"),
    ("server", "http"),
    ("http", "server"),
    ("daemon", "service"),
    ("daemon", "loading"),
    ("daemon", "part_settings"),
    ("daemon", "reload"),
    ("daemon", "hangup"),
    ("daemon", "idle"),
    ("daemon", "stop"),
    ("daemon", "doors"),
    ("daemon", "request_log"),
    ("stop", "hangup"),
    ("doors", "part_settings"),
    ("doors", "service"),
    ("reload", "part_settings"),
    ("reload", "service"),
    ("cli", "evaluate"),
    ("cli", "bench"),
    ("cli", "doctor"),
}

CONVERT_MAY_IMPORT = {"convert", "core", "errors"}
"""`convert` stands beside the levels: it sees core and errors; the commands and the measuring parts see it, and what
loads a model, since torch serves checkpoints.
"""

CONVERT_IMPORTERS = {"convert", "loading", "cli", "evaluate", "bench", "doctor"}

HEAVY_FRAMEWORKS = {"torch", "transformers", "intel_extension_for_pytorch"}
NEED_THEM = ("runtime/torch/", "runtime/ipex/")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Dotted names that a module imports, wherever in it: at the top, in functions, under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(path: Path) -> str:
    """`edgeqwen/server/framing.py` -> `server`; the package's own `__init__` -> ``."""
    relative = path.relative_to(PACKAGE)
    return "" if relative.name == "__init__.py" and len(relative.parts) == 1 else relative.parts[0].removesuffix(".py")


def fault(part: str, target: str) -> str | None:
    """Why `part` may not import `target`, or None if it may."""
    if target == part or target in {"", "__version__"}:
        return None
    if part == "":
        return "the package's own __init__ imports nothing"
    if part == "convert":
        return None if target in CONVERT_MAY_IMPORT else "convert sees core and errors only"
    if target == "convert":
        return None if part in CONVERT_IMPORTERS else "convert is for the commands only"
    if target not in LEVELS:
        return "it has no level"
    if LEVELS[target] < LEVELS[part] or (part, target) in ALLOWED_BESIDE:
        return None
    return f"level {LEVELS[part]} imports level {LEVELS[target]}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_downwards(path: Path) -> None:
    part = part_of(path)
    assert part in {"", "convert"} or part in LEVELS, f"{path.name} belongs to no level"
    targets = {name.split(".")[1] for name in imports_of(path) if name.startswith("edgeqwen.")}
    faults = {target: reason for target in targets if (reason := fault(part, target)) is not None}
    assert not faults, f"{path.relative_to(ROOT)}: {faults}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_runtimes_on_torch_import_it(path: Path) -> None:
    if not str(path.relative_to(PACKAGE)).startswith(NEED_THEM):
        assert not {name.split(".")[0] for name in imports_of(path)} & HEAVY_FRAMEWORKS


def test_rule_refuses_upward_sideways_and_unknown_imports() -> None:
    assert fault("core", "engine") is not None
    assert fault("text", "kvcache") is not None
    assert fault("runtime", "convert") is not None
    assert fault("convert", "runtime") is not None
    assert fault("server", "nowhere") is not None
    assert fault("engine", "scheduler") is None


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    script = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(result.stdout.split())


HEAVY = {"numpy", "onnx", "onnxruntime", "aiohttp", "tokenizers", "jinja2", "huggingface_hub", "rich", "uvloop"}


def test_ask_starts_without_the_heavy_libraries() -> None:
    loaded = loaded_after("import edgeqwen.cli.main, edgeqwen.cli.ask, edgeqwen.client")
    assert "click" in loaded
    assert not loaded & HEAVY


def test_daemon_does_not_import_aiohttp_before_the_first_http_byte() -> None:
    loaded = loaded_after("import edgeqwen.daemon, edgeqwen.engine.inference, edgeqwen.server")
    assert "msgspec" in loaded
    assert not loaded & {"aiohttp", "onnx", "huggingface_hub", "gguf", *HEAVY_FRAMEWORKS}


def test_deciding_on_torch_does_not_import_it() -> None:
    loaded = loaded_after("import edgeqwen.loading.checkpoint_model, edgeqwen.runtime.torch.options")
    assert not loaded & HEAVY_FRAMEWORKS
