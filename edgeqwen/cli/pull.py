"""`edgeqwen pull`: a model of a hub becomes an installed package."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeqwen.cli.importing import ImportOptions, import_checkpoint, import_options, report
from edgeqwen.cli.progress import progress_bar
from edgeqwen.cli.threads import checked_processor

if TYPE_CHECKING:
    from edgeqwen.core.model import Manifest


@click.command("pull", short_help="Fetch a model from a hub and import it.")
@click.argument("model", metavar="ID")
@click.option("--revision", metavar="REV", help="Branch, tag or commit. Default: the main branch.")
@click.option("--offline", is_flag=True, help="Use what was fetched before, without a network.")
@import_options
def command(model: str, *, revision: str | None, offline: bool, as_json: bool, **given: Any) -> None:
    """Fetch ID from a hub and import it: ORG/NAME, ORG/NAME:FILE.gguf, or modelscope:ORG/NAME.

    HF_ENDPOINT and MODELSCOPE_ENDPOINT name mirrors. An interrupted pull goes on where it stopped.
    """
    package, manifest = pull_model(model, ImportOptions(**given), revision=revision, offline=offline)
    report(package, manifest, as_json=as_json)


def pull_model(
    model: str, options: ImportOptions, *, revision: str | None = None, offline: bool = False
) -> tuple[Path, Manifest]:
    """Fetch and import; the commit that was fetched is written into the package."""
    checked_processor()
    from edgeqwen.convert.hub import HubSettings, parse_id, pull

    name = parse_id(model).name
    settings = HubSettings.from_environment(os.environ)
    if offline:
        settings = replace(settings, offline=True)
    with progress_bar(f"fetching {name}") as progress:
        fetched = pull(model, settings=settings, revision=revision, progress=progress)
    return import_checkpoint(fetched.path, options, name=name, source=fetched.source)
