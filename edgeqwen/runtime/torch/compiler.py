"""Compiled layers: torch's inductor makes vectorised C++ of what stands between the products.

A layer is compiled ahead of use, for one row and for any number of rows; those two serve all layers and are all there
is, so nothing is compiled while somebody waits for an answer. What torch would check before each call (shapes, types)
holds by construction, and checking takes longer than the code that it guards. Compiled functions are kept in a folder
and read at the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from edgeqwen.errors import ConfigInvalid, EdgeqwenError
from edgeqwen.runtime.torch.library import JIT_ADVICE, first_line

FOLDER_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
NO_EXECUTION: Final = ("failed to map segment", "cannot execute", "Operation not permitted", "Permission denied")
FILE_VERSION: Final = 1
SEVERAL: Final = 8

log = logging.getLogger(__name__)
Function = Callable[..., Any]


class Compiler:
    """Compiles a function of rows. `facts` say what its code depends on besides torch and processor; `folder` None:
    nothing is kept.
    """

    def __init__(self, folder: Path | None, facts: str) -> None:
        if not hasattr(torch.compile(_nothing), "aot_compile"):
            raise ConfigInvalid(
                f"torch.mode: compile needs torch 2.10 or later, and this is {torch.__version__}: "
                "`pip install --upgrade torch`, or take torch.mode = eager"
            )
        self._folder = folder
        self._facts = f"{FILE_VERSION} {torch.__version__} {facts}"

    def compile(
        self, function: Function, arguments: Callable[[int], tuple[Any, ...]], progress: Callable[[float], None]
    ) -> Function:
        """`function(rows, cosines, sines, ...)`, compiled. `arguments(count)` are such as it will be called with for
        `count` rows; the first dimension of the first three differs between calls. `progress` is told when half is
        done: on a slow machine each half takes most of a minute.
        """
        single = self._made(function, arguments(1), name="row")
        progress(0.5)
        several_arguments = arguments(SEVERAL)
        for tensor in several_arguments[:3]:
            torch._dynamo.mark_dynamic(tensor, 0)
        several = self._made(function, several_arguments, name="rows")

        def run(rows: Any, *rest: Any) -> Any:
            return single(rows, *rest) if rows.shape[0] == 1 else several(rows, *rest)

        return run

    def _made(self, function: Function, arguments: tuple[Any, ...], *, name: str) -> Function:
        path = self._path(name)
        kept = _read(path, arguments) if path is not None else None
        if kept is not None:
            return kept
        compiled = torch.compile(function, dynamic=False, fullgraph=True).aot_compile((arguments, {}))
        if path is not None:
            _write(path, compiled)
        compiled.disable_guard_check()
        made: Function = compiled
        return made

    def _path(self, name: str) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(f"{self._facts} {name}".encode()).hexdigest()[:16]
        return self._folder / f"layer-{digest}.bin"


def _nothing() -> None:
    """Asked what can be done with a compiled function."""


def _read(path: Path, arguments: tuple[Any, ...]) -> Function | None:
    """A function that was kept, if it can be used."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            function: Any = torch.compiler.load_compiled_function(file)
        function.disable_guard_check()
        function(*arguments)
    except Exception as error:
        log.warning("compiled code is made anew: %s cannot be used (%s)", path, first_line(error))
        return None
    kept: Function = function
    return kept


def _write(path: Path, compiled: Any) -> None:
    """Keep a function for the next start; without it that takes longer, and nothing else."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        compiled.save_compiled_function(str(beside))
        beside.replace(path)
    except Exception as error:
        log.warning("compiled code is not kept: %s", first_line(error))
        with contextlib.suppress(OSError):
            beside.unlink()


@contextmanager
def explained() -> Iterator[None]:
    """What fails inside, while code is made or loaded, is `ConfigInvalid` in one line that says what to change."""
    try:
        yield
    except Exception as error:
        raise explanation(error) from error


def explanation(error: BaseException) -> EdgeqwenError:
    """What to say of an error of the compiler, of the one below it, or of loading its code."""
    causes = list(_causes(error))
    text = "\n".join(str(cause) for cause in causes)
    folder = os.environ.get(FOLDER_VARIABLE, "its folder")
    if any(type(cause).__name__ == "InvalidCxxCompiler" for cause in causes):
        return ConfigInvalid(
            "torch.mode: compile needs a C++ compiler, and none was found: `apt-get install g++`, or name one in CXX, "
            "or take torch.mode = eager"
        )
    if "Python.h" in text:
        return ConfigInvalid(
            "torch.mode: compile needs Python's headers (Python.h): `apt-get install python3-dev`, or take "
            "torch.mode = eager"
        )
    if any(mark in text for mark in NO_EXECUTION):
        return ConfigInvalid(
            f"torch.mode: compile keeps code in {folder}, which may not be written, or executed from: let "
            "service.cache_dir name another place, in a unit ExecPaths= (the drop-in jit.conf), or take "
            "torch.mode = eager"
        )
    if "could not create a primitive" in text:
        return ConfigInvalid(f"engine.runtime: torch's oneDNN cannot make its code here: {JIT_ADVICE}")
    if isinstance(error, EdgeqwenError):
        return error
    return ConfigInvalid(f"torch.mode: compile failed ({first_line(causes[-1])}); torch.mode = eager does without")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it was raised from or during, the first cause last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or getattr(error, "inner_exception", None) or error.__context__
