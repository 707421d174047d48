"""`edgeqwen import`: a checkpoint on disk becomes an installed package, or a package one for another processor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeqwen.cli.places import models_folder
from edgeqwen.cli.progress import progress_bar
from edgeqwen.cli.threads import checked_processor
from edgeqwen.errors import BadRequest, ModelInvalid

if TYPE_CHECKING:
    from edgeqwen.core.model import Manifest, Source
    from edgeqwen.cpu import Target

QUANTS = ("auto", "hybrid", "int8", "int4", "fp32")
DEFAULT_QUANT = "int8"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The flags that `import` and `pull` share; None is "not given"."""

    quant: str
    target: Target | None
    out: Path | None
    name: str | None
    fast: bool = False


def import_options(function: Any) -> Any:
    """The click options behind `ImportOptions`, for both commands."""
    decorators = [
        click.option(
            "--quant", type=click.Choice(QUANTS), default=DEFAULT_QUANT, show_default=True, help="Form of the weights."
        ),
        click.option(
            "--target",
            type=click.Choice(("any", "vnni", "arm")),
            help="Processors the package is for; any runs everywhere, slower on some. Default: this machine's kind.",
        ),
        click.option("--fast", is_flag=True, help="Without calibration: quicker, less exact, no int8 cache."),
        click.option(
            "--out", type=click.Path(path_type=Path), help="Folder of the package. Default: among the installed models."
        ),
        click.option("--name", help="Name of the model. Default: from the source's name."),
        click.option("--json", "as_json", is_flag=True, help="Say what was made as one JSON object."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


@click.command("import", short_help="Import a safetensors folder, a GGUF file or a graph of optimum's.")
@click.argument("path", type=click.Path(path_type=Path))
@import_options
def command(path: Path, *, as_json: bool, **given: Any) -> None:
    """Make a package of the checkpoint PATH: a safetensors folder or a GGUF file.

    PATH may be a package too: it is remade for the processors of --target, with the same numbers. Of a folder that
    `optimum-cli export onnx` has written, or an .onnx file in it, the graph is taken as it is.
    """
    checked_processor()  # what follows imports native libraries
    from edgeqwen.convert.sources import is_exported
    from edgeqwen.core.package import is_package

    options = ImportOptions(**given)
    source = click.get_current_context().get_parameter_source("quant")
    quant = options.quant if source is click.core.ParameterSource.COMMANDLINE else None
    if is_package(path):
        package, manifest = remake_package(path, options, quant=quant)
    elif is_exported(path):
        package, manifest = import_graph(path, options, quant=quant)
    else:
        package, manifest = import_checkpoint(path, options)
    report(package, manifest, as_json=as_json)


def remake_package(path: Path, options: ImportOptions, *, quant: str | None) -> tuple[Path, Manifest]:
    """The package at `path` made for other processors; its quantisation can't change any more."""
    processor = checked_processor()
    from edgeqwen.convert.retarget import retarget_package
    from edgeqwen.core.package import open_package

    manifest = open_package(path).manifest
    if quant is not None and quant != manifest.quant:
        raise ModelInvalid(f"{path}: a package of {manifest.quant}; import the checkpoint it was made of as {quant}")
    chosen = options.name or (options.out.name if options.out else manifest.name)
    out, target = options.out or models_folder() / chosen, options.target or processor.target
    with progress_bar(f"remaking {chosen} for {target}") as progress:
        return out, retarget_package(path, out, target=target, name=chosen, progress=progress)


def import_graph(path: Path, options: ImportOptions, *, quant: str | None) -> tuple[Path, Manifest]:
    """The package of a graph that is taken as it is, and so has its quantisation and its processors already."""
    for flag, is_given in (("--quant", quant is not None), ("--target", options.target), ("--fast", options.fast)):
        if is_given:
            raise BadRequest(
                f"{flag}: {path} holds a graph exported by optimum, which is taken as it is; leave {flag} out, or "
                "import the checkpoint that the graph was exported from"
            )
    from edgeqwen.convert.exported import import_exported
    from edgeqwen.core.package import open_package
    from edgeqwen.runtime.exported import TRIAL_IDS, ExportedRuntime
    from edgeqwen.runtime.onnx import OnnxOptions

    def trial(folder: Path) -> None:
        ExportedRuntime.load(open_package(folder), OnnxOptions(num_slots=2, capacity=len(TRIAL_IDS))).close()

    folder = path.parent if path.suffix == ".onnx" else path
    chosen = options.name or (options.out.name if options.out else default_name(folder.resolve().name, DEFAULT_QUANT))
    out = options.out or models_folder() / chosen
    with progress_bar(f"importing {chosen}") as progress:
        return out, import_exported(path, out, name=chosen, trial=trial, progress=progress)


def import_checkpoint(
    path: Path, options: ImportOptions, *, name: str | None = None, source: Source | None = None
) -> tuple[Path, Manifest]:
    """Import `path` as the flags say; `name` and `source` are what a pull knows better than the path."""
    processor = checked_processor()
    from edgeqwen.convert.importer import import_model

    quant: Any = _chosen_quant(path) if options.quant == "auto" else options.quant
    chosen = options.name or (options.out.name if options.out else default_name(name or path.name, quant))
    out = options.out or models_folder() / chosen
    target = options.target or processor.target
    with progress_bar(f"importing {chosen}") as progress:
        manifest = import_model(
            path,
            out,
            quant=quant,
            target=target,
            name=chosen,
            source=source,
            calibrates=not options.fast,
            progress=progress,
        )
    return out, manifest


def _chosen_quant(path: Path) -> Any:
    """What `auto` picks for the model at `path` on this machine; says why."""
    from edgeqwen.convert.sources import open_checkpoint
    from edgeqwen.core.fit import choose_quant
    from edgeqwen.cpu import read_memory

    checkpoint = open_checkpoint(path)
    try:
        quant, reason = choose_quant(checkpoint.spec, free_bytes=read_memory().free)
    finally:
        checkpoint.close()
    click.echo(f"edgeqwen: --quant auto takes {quant}: {reason}", err=True)
    return quant


def default_name(source_name: str, quant: str) -> str:
    """The name of a package; a quant but the default is added."""
    from edgeqwen.core.model import model_name

    name = model_name(source_name)
    return name if quant == DEFAULT_QUANT else f"{name}-{quant}"


def report(package: Path, manifest: Manifest, *, as_json: bool) -> None:
    """The package's path on stdout (or a JSON object), what is worth knowing on stderr."""
    size = sum(manifest.sizes.values())
    if as_json:
        facts = {"name": manifest.name, "path": str(package), "quant": manifest.quant, "target": manifest.target}
        facts |= {"weight_form": manifest.weight_form}
        click.echo(json.dumps(facts | {"bytes": size, "notes": list(manifest.notes)}))
        return
    for note in manifest.notes:
        click.echo(f"edgeqwen: note: {note}", err=True)
    click.echo(f"edgeqwen: {manifest.name}: {manifest.quant}, {size / 1e6:.0f} MB", err=True)
    click.echo(package)
