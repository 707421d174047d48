"""`edgeqwen models`: what is installed."""

from __future__ import annotations

import json

import click

from edgeqwen.cli.places import models_folder


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a model.")
def command(as_json: bool) -> None:
    """List the installed models."""
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
