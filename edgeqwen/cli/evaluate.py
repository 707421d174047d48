"""`edgeqwen eval`: how good a package is, alone or against another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeqwen.cli.places import models_folder
from edgeqwen.cli.progress import progress_bar
from edgeqwen.cli.threads import checked_processor, planned_threads, thread_options
from edgeqwen.config import KV_TYPES

if TYPE_CHECKING:
    from edgeqwen.evaluate import EvalReport

FILE = click.Path(path_type=Path)


@click.command("eval", short_help="Measure perplexity, and the distance from another package.")
@click.argument("package")
@click.option("--text", "text_path", type=FILE, help="Text to measure on. Default: built-in English, code and Chinese.")
@click.option("--against", help="Package to compare with: KL divergence, agreement of the likeliest token.")
@click.option("--ids", "ids_path", type=FILE, help="Token ids (.npy, 1-D) to write logits for, instead of measuring.")
@click.option("--logits", "logits_path", type=FILE, help="Where: float32 [tokens, vocabulary] (.npy).")
@click.option(
    "--stage",
    type=click.Choice(("decode", "prefill")),
    default="decode",
    show_default=True,
    help="Graph to measure, where answers and prompts have one each.",
)
@click.option("--kv", "kv_type", type=click.Choice(KV_TYPES), default="auto", show_default=True, help="Cache.")
@thread_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    package: str,
    *,
    ids_path: Path | None,
    logits_path: Path | None,
    threads: int,
    cpus: str,
    as_json: bool,
    **measuring: Any,
) -> None:
    """Perplexity of PACKAGE (a folder or a name), and its distance from another of the same vocabulary.

    \b
    ppl      perplexity, lower is better; ref ppl: the other package's
    KL       divergence from the other's predictions, in nats
    top-1    share of positions where both find the same token likeliest
    gap      where they do not: by how many logits the other was surer, at most
    counted  English and code together; Chinese is shown beside them
    """
    from edgeqwen.core.package import resolve_model

    checked_processor()
    if (ids_path is None) != (logits_path is None):
        raise click.UsageError("--ids and --logits go together")
    num_threads = planned_threads(threads=threads, cpus=cpus).decode.num_threads
    path = resolve_model(package, models_folder())
    if ids_path is not None and logits_path is not None:
        from edgeqwen.evaluate import write_logits

        num_tokens = write_logits(path, ids_path=ids_path, out=logits_path, num_threads=num_threads)
        click.echo(json.dumps({"tokens": num_tokens}) if as_json else f"{num_tokens} tokens: {logits_path}")
        return
    report = _measure(path, num_threads, **measuring)
    click.echo(report.to_json() if as_json else report.to_text())


def _measure(path: Path, num_threads: int, *, against: str | None, kv_type: str, **measuring: Any) -> EvalReport:
    from edgeqwen.core.package import resolve_model
    from edgeqwen.evaluate import evaluate

    kv: Any = None if kv_type == "auto" else kv_type
    other = resolve_model(against, models_folder()) if against else None
    with progress_bar(f"measuring {path.name}") as progress:
        return evaluate(path, against=other, num_threads=num_threads, kv_type=kv, progress=progress, **measuring)
