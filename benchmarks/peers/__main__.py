"""edgeqwen beside llama.cpp, OpenVINO, onnxruntime-genai, optimum and transformers: ratios, measured in turns.

    scripts/benchmark peers [--only llama.cpp,openvino] [--rows prefill,decode,streams,rest,quality] [--pairs 3] ...

Sets each peer up in an environment of its own below the cache (once: minutes and gigabytes; llama.cpp is compiled),
makes a model in Qwen3-0.6B's shape in every form, then measures, all in one run. Speeds are ratios of ours over theirs,
the median of the pairs; a ratio above 1 means edgeqwen is faster. Quality is measured on a small real model. Tables go
to standard output; JSON and an SVG picture into the cache. What cannot be had is listed with the reason. `--prepare`
sets up and makes everything, and measures nothing. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks._standin import NUM_LAYERS
from benchmarks.peers import models, plot, quality, rest, speed
from benchmarks.peers.catalogue import FORMS, PEERS, Form, peer_named
from benchmarks.peers.contenders import OURS, Contender, ours, theirs
from benchmarks.peers.environments import CHECKOUT, Environment, Unavailable, prepare, say
from benchmarks.peers.models import Model
from benchmarks.peers.points import Row, points_of, rows_of
from benchmarks.peers.report import Report, machine, render

KINDS = ("prefill", "decode", "streams", "rest", "quality")
SPEED_KINDS = KINDS[:3]


@dataclass(slots=True)
class Session:
    """One run of this program: what was asked for, and the report as it grows."""

    given: argparse.Namespace
    report: Report
    environments: list[Environment] = field(default_factory=list)

    def attempt(self, what: str, make: Callable[[], Path]) -> Path | None:
        """What `make` makes; None, and a line in the report, if it cannot be had."""
        try:
            return make()
        except Unavailable as error:
            self.fail(what, str(error))
            return None

    def fail(self, what: str, reason: str) -> None:
        say(f"{what}: {reason}")
        self.report.unavailable.append({"what": what, "reason": reason})


def main() -> None:
    given = arguments()
    given.cache.mkdir(parents=True, exist_ok=True)
    options = list(bench_options(given))
    configuration = {
        "threads": given.threads,
        "pairs": given.pairs,
        "layers": given.layers,
        "bench_options": options,
    }
    session = Session(given, Report(machine(), configuration))
    set_up(session)
    if set(given.rows) & {*SPEED_KINDS, "rest"}:
        measure_shape(session)
    if "quality" in given.rows:
        measure_quality(session)
    if not given.prepare:
        write(session)
        print(render(session.report, is_markdown=given.markdown))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--only", type=_list_of(names), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--forms", type=_list_of(FORMS), help=f"of {', '.join(FORMS)}; default: all")
    parser.add_argument("--rows", type=_list_of(KINDS), default=list(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--quants", type=lambda text: text.split(","), default=["int8", "int4", "hybrid"])
    parser.add_argument("--pairs", type=int, default=3, help="rounds; default: 3")
    parser.add_argument("--threads", type=int, default=2, help="for both sides; default: 2")
    parser.add_argument("--longest", type=int, default=3072, help="leave out longer prompts; default: 3072")
    parser.add_argument("--decode", type=int, default=64, help="decode at most so many tokens in a run; default: 64")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="fewer make a trial of this program quick")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of idling to measure; default: 60")
    parser.add_argument("--kv", help="type of the cache, for every package of ours; default: its own choice")
    parser.add_argument("--cache", type=Path, default=CHECKOUT / ".cache" / "peers")
    parser.add_argument("--python", type=_assignment, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--source", type=Path, help="GGUF file for the rows of quality; default: a small package's")
    parser.add_argument("--remake", action="store_true", help="import our packages again")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="default: report.json in the cache")
    parser.add_argument("--prepare", action="store_true", help="set up and make everything, measure nothing")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    given = parser.parse_args()
    given.cache = given.cache.absolute()
    return given


def _list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return names

    return parse


def _assignment(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("must be NAME=PATH")
    return name, Path(path).absolute()


def bench_options(given: argparse.Namespace) -> tuple[str, ...]:
    """One configuration of ours for all rows."""
    return (f"--kv={given.kv}",) if given.kv else ()


def set_up(session: Session) -> None:
    """Environments of all peers asked for; those that cannot be had are in the report."""
    pythons = dict(session.given.python)
    for name in session.given.only:
        try:
            environment = prepare(peer_named(name), session.given.cache, pythons.get(name))
            session.report.versions[name] = environment.versions()
            session.environments.append(environment)
        except Unavailable as error:
            session.fail(name, str(error))


def contenders(
    session: Session, model: Model, wanted: Callable[[Form], bool]
) -> tuple[list[Contender], list[Contender]]:
    """Ours and theirs on this model, in every form that can be had."""
    given = session.given
    own, other = [], []
    for quant in given.quants:
        make = partial(models.package, model, quant, remake=given.remake)
        if path := session.attempt(f"{OURS} {quant}", make):
            own.append(ours(quant, path, bench_options(given)))
    for environment in session.environments:
        for form in filter(wanted, environment.peer.forms):
            label = f"{environment.peer.name} {form.name}"
            if given.forms and label not in given.forms:
                continue
            if path := session.attempt(label, partial(models.form, model, environment, form)):
                other.append(theirs(environment, form, path))
    return own, other


def measure_shape(session: Session) -> None:
    """Speed, memory, idling, in the shape of Qwen3-0.6B."""
    given, report = session.given, session.report
    own, other = contenders(session, models.standin(given.cache, given.layers), lambda form: form.has_speed)
    if given.prepare:
        return
    rows = rows_of(given.rows, longest=given.longest)
    if rows:
        measure_speed(session, own, other, rows)
    if "rest" in given.rows:
        report.rest, failures = rest.measure(
            [*own, *other],
            given.cache / "state",
            rounds=given.pairs,
            idle_s=given.idle,
            num_threads=given.threads,
        )
        for label, reason in failures.items():
            session.fail(f"{label}: start, memory, idle", reason)


def measure_speed(session: Session, own: list[Contender], other: list[Contender], rows: list[Row]) -> None:
    """Round by round; the report is written after each, so that an end before its time leaves what there is."""
    given, report = session.given, session.report
    known = len(report.unavailable)
    points = points_of(rows, most_decoded=given.decode)
    for found in speed.measure(own, other, points, pairs=given.pairs, num_threads=given.threads):
        report.configuration["packages"] = {mine.form: speed.configuration(found, mine) for mine in own}
        report.own = [each for mine in own for each in speed.own_medians(found, mine, rows)]
        cells = (speed.compare(found, mine, peer, row) for mine in own for peer in other for row in rows)
        report.comparisons = [cell for cell in cells if cell]
        failures = found.failures.items()
        report.unavailable[known:] = [
            {"what": f"{label} ({setting}), {prompt} tokens, {streams} streams", "reason": reason}
            for (label, setting, (prompt, streams)), reason in failures
        ]
        write(session)


def measure_quality(session: Session) -> None:
    """Distances from full precision on the real model."""
    given = session.given
    model = models.rotated(given.cache, given.source)
    own, other = contenders(session, model, lambda form: form.has_quality)
    reference = session.attempt(f"{OURS} fp32", lambda: models.package(model, "fp32", remake=given.remake))
    if given.prepare or reference is None:
        return
    folder = given.cache / "quality"
    session.report.quality, failures = quality.measure([*own, *other], reference, folder, num_threads=given.threads)
    for label, reason in failures.items():
        session.fail(f"{label}: quality", reason)


def write(session: Session) -> None:
    """JSON and picture of what was found so far."""
    path = session.given.report or session.given.cache / "report.json"
    path.write_text(json.dumps(session.report.to_dict(), indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".svg").write_text(plot.svg(session.report), encoding="utf-8")
    say(f"{path} and {path.with_suffix('.svg').name}")


if __name__ == "__main__":
    main()
