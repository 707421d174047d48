"""`edgeqwen eval`: how good a package is, alone or against another."""

from __future__ import annotations

from pathlib import Path

import click

from edgeqwen.cli.places import models_folder

FILE = click.Path(path_type=Path)


@click.command("eval")
@click.argument("package")
@click.option("--text", "text_path", type=FILE, help="Text to measure on. Default: a built-in mix.")
@click.option("--against", help="Package to compare with: KL divergence, agreement of the likeliest token.")
@click.option("--ids", "ids_path", type=FILE, help="Token ids (.npy, 1-D) instead of a text.")
@click.option("--logits", "logits_path", type=FILE, help="Write float32 logits [tokens, vocabulary] there (.npy).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    package: str,
    *,
    text_path: Path | None,
    against: str | None,
    ids_path: Path | None,
    logits_path: Path | None,
    as_json: bool,
) -> None:
    """Perplexity of PACKAGE (a folder or a name), and its distance from another of the same vocabulary."""
    from edgeqwen.core.package import resolve_model
    from edgeqwen.evaluate import evaluate

    folder = models_folder()
    report = evaluate(
        resolve_model(package, folder),
        text_path=text_path,
        against=resolve_model(against, folder) if against else None,
        ids=ids_path,
        logits_out=logits_path,
    )
    click.echo(report.to_json() if as_json else report.to_text())
