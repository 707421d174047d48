"""`edgeqwen config`: what `serve` would make of file, environment and flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from edgeqwen.cli.serving_flags import serving_options, sources_of


@click.group("config", short_help="Show the configuration that `serve` would have, or check it.")
def command() -> None:
    """Show the configuration that `serve` would have from the same file, environment and flags; or check it."""


@command.command("show")
@serving_options
@click.option("--changed", is_flag=True, help="Only what differs from the default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, by `table.key`.")
def show(*, config_path: Path | None, changed: bool, as_json: bool, **flags: Any) -> int:
    """Say each setting's value, where it was set, and whether a running daemon takes a new one (live)."""
    from edgeqwen.cli.config_report import settings_of, to_toml

    settings = [each for each in settings_of(sources_of(config_path, flags)) if each.is_changed or not changed]
    click.echo(json.dumps({each.name: each.to_dict() for each in settings}) if as_json else to_toml(settings))
    return 0


@command.command("check")
@serving_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(*, config_path: Path | None, as_json: bool, **flags: Any) -> int:
    """Say all that keeps `serve` from starting with this configuration, and what is doubtful. Exits with 78 if there is
    anything of the first kind.
    """
    from edgeqwen.cli.config_report import check_all
    from edgeqwen.errors import EXIT_CONFIG

    report = check_all(sources_of(config_path, flags))
    click.echo(json.dumps(report.to_dict()) if as_json else report.to_text())
    return EXIT_CONFIG if report.problems else 0
