"""`edgeqwen models`: what is installed, and how it goes away again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from edgeqwen.cli.places import models_folder
from edgeqwen.cli.streams import complain, valid_text

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a model.")


@click.group("models", invoke_without_command=True, short_help="List or remove the installed models.")
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the installed models: name, form of the weights, size, source."""
    if context.invoked_subcommand is not None:
        return
    from edgeqwen.core.package import installed_models, open_package
    from edgeqwen.errors import FileError

    folder = models_folder()
    names = installed_models(folder)
    if not names:
        advice = "get one with `edgeqwen pull ID` or `edgeqwen import PATH`"
        click.echo(f"edgeqwen: no models in {folder}; {advice}", err=True)
    for name in names:
        try:
            manifest = open_package(folder / name).manifest
        except FileError as error:
            click.echo(f"edgeqwen: {error.message}", err=True)
            continue
        size = sum(manifest.sizes.values())
        if as_json:
            row = {"name": name, "path": str(folder / name), "quant": manifest.quant, "bytes": size}
            click.echo(json.dumps(row | {"source": manifest.source.id, "revision": manifest.source.revision}))
        else:
            click.echo(f"{name:32} {manifest.quant:5} {size / 1e6:8.0f} MB  {manifest.source.id}")


@command.command("rm", short_help="Remove some.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option
def rm_command(names: tuple[str, ...], *, as_json: bool) -> int:
    """Remove installed models, without asking. A daemon that serves one goes on until it ends, and the room on the disk
    is free then. Those that cannot be removed are named, and the others go all the same.
    """
    from edgeqwen.errors import FileError

    exit_code = 0
    for name in names:
        try:
            num_bytes = remove_model(models_folder(), valid_text(name, "the name of the model"))
        except FileError as error:
            complain(f"edgeqwen: {error.message}")
            exit_code = exit_code or error.exit_code
        else:
            row = json.dumps({"name": name, "bytes": num_bytes})
            click.echo(row if as_json else f"removed {name}: {num_bytes / 1e6:.0f} MB ({num_bytes} bytes)")
    return exit_code


def remove_model(folder: Path, name: str) -> int:
    """Remove the package `name` of the models directory `folder`; returns how many bytes its files had.

    Raises `ModelMissing` for what is no package in there, `CannotWrite`.
    """
    from edgeqwen.core.package import installed_models
    from edgeqwen.errors import CannotWrite, ModelMissing

    if name not in installed_models(folder):
        raise ModelMissing(f"{name}: no model in {folder}; `edgeqwen models` shows which there are")
    place, aside = folder / name, folder / f".{name}.removed"
    try:
        if place.is_symlink():  # what it leads to is somebody else's
            place.unlink()
            return 0
        if aside.exists():  # of a removal that was killed
            shutil.rmtree(aside)
        place.rename(aside)  # in one step: nobody finds half a package
        num_bytes = sum(path.lstat().st_size for path in aside.rglob("*") if not path.is_dir())
        shutil.rmtree(aside)
    except OSError as error:
        raise CannotWrite(f"{place}: cannot be removed: {error.strerror}") from error
    return num_bytes
