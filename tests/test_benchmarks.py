"""What the benchmark programs compute from what they measure, and the sources they make."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from benchmarks import _smollm2, threads
from benchmarks._processes import cpu_s, memory
from benchmarks.peers import distance, plot, points, report, speed
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.contenders import Contender
from benchmarks.peers.environments import Unavailable, run, run_json
from benchmarks.peers.runners import base
from edgeqwen import evaluate
from edgeqwen.convert.importer import import_model
from edgeqwen.convert.sources import open_checkpoint
from tests.checkpoints import write_gguf_model, write_safetensors_model

ROW = points.Row("decode at 128", "decode_tok_s", 128)
OURS = Contender("edgeqwen", "int8", Path("int8"))
PEER = Contender("peer", "q", Path("q"), ("plain", "flash"))


def sample(number: int, contender: Contender, value: float, setting: str = "default") -> speed.Sample:
    return speed.Sample((number, "peer"), ROW.point, contender, setting, {"decode_tok_s": value})


def rounds() -> speed.Speeds:
    """Three rounds on a machine that is half as fast in the second."""
    speeds = speed.Speeds()
    for number, factor in enumerate((1.0, 0.5, 1.0)):
        speeds.samples += [
            sample(number, OURS, 30 * factor),
            sample(number, PEER, 10 * factor, "plain"),
            sample(number, PEER, 20 * factor, "flash"),
        ]
    return speeds


def filled_report() -> report.Report:
    cell = speed.compare(rounds(), OURS, PEER, ROW)
    assert cell
    filled = report.Report({}, {}, comparisons=[cell], own=speed.own_medians(rounds(), OURS, [ROW]))
    filled.unavailable.append({"what": "other <int4>", "reason": "exit code 1: no such version"})
    return filled


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rotated_model_computes_the_same_function(family: Any, tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "a.gguf", family=family)
    _smollm2.make_plain(tmp_path / "a.gguf", tmp_path / "plain")
    _smollm2.make_rotated(tmp_path / "a.gguf", tmp_path / "rotated", tmp_path / "rotated.gguf")
    np.save(tmp_path / "ids.npy", np.arange(3, 40))
    logits = []
    for source in ("plain", "rotated", "rotated.gguf"):
        import_model(tmp_path / source, tmp_path / "package", quant="fp32", target="any", name="a")
        evaluate.write_logits(tmp_path / "package", ids_path=tmp_path / "ids.npy", out=tmp_path / "logits.npy")
        logits.append(np.load(tmp_path / "logits.npy"))
    assert np.ptp(logits[0]) > 1
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
    np.testing.assert_array_equal(logits[2], logits[1])


def test_rotation_moves_every_matrix(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "a.gguf", family="llama")
    _smollm2.make_rotated(tmp_path / "a.gguf", tmp_path / "rotated", tmp_path / "rotated.gguf")
    before, after = open_checkpoint(tmp_path / "a.gguf"), open_checkpoint(tmp_path / "rotated")
    try:
        for name, info in before.tensors.items():
            if len(info.shape) == 2:
                assert np.abs(before.read(name) - after.read(name)).mean() > 0.01, name
    finally:
        before.close()
        after.close()


def test_logits_in_files_are_scored_as_packages_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "built_in_texts", lambda: dict.fromkeys(evaluate.BUILT_IN, "hello world " * 40))
    monkeypatch.setattr(distance, "run", in_process)
    write_safetensors_model(tmp_path / "model")
    for quant in ("fp32", "int8"):
        import_model(tmp_path / "model", tmp_path / quant, quant=quant, target="any", name=quant)
    texts = distance.write_reference(tmp_path / "fp32", tmp_path / "reference", num_threads=1)
    candidate = distance.write_reference(tmp_path / "int8", tmp_path / "candidate", num_threads=1)
    found = distance.scores(texts, {text.name: text.logits for text in candidate})
    own = evaluate.evaluate(tmp_path / "int8", against=tmp_path / "fp32")
    assert own.counted.kl_mean
    assert found["counted"] == own.counted
    assert tuple(found[name] for name in evaluate.BUILT_IN) == own.scores


def in_process(command: list[str]) -> str:
    """`edgeqwen eval PACKAGE --ids IDS --logits LOGITS ...` without a process."""
    ids, out = (Path(command[command.index(flag) + 1]) for flag in ("--ids", "--logits"))
    return str(evaluate.write_logits(Path(command[4]), ids_path=ids, out=out))


def test_a_comparison_is_the_median_of_ratios_in_the_better_setting() -> None:
    cell = speed.compare(rounds(), OURS, PEER, ROW)
    assert cell
    assert (cell.setting, cell.ratio, cell.ratios) == ("flash", 1.5, (1.5, 1.5, 1.5))
    assert (cell.ours_tok_s, cell.peer_tok_s) == (30, 20)


def test_a_setting_far_from_the_best_is_measured_in_the_first_round_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def fake(self: Contender, point: points.Point, setting: str, *, num_threads: int) -> dict[str, Any]:
        asked.append((self.form, setting))
        return {"prefill_tok_s": 1.0, "decode_tok_s": {"plain": 10.0, "flash": 20.0, "default": 30.0}[setting]}

    monkeypatch.setattr(Contender, "measure", fake)
    list(speed.measure([OURS], [PEER], points.points_of([ROW]), pairs=2, num_threads=1))
    assert asked == [("int8", "default"), ("q", "plain"), ("q", "flash"), ("int8", "default"), ("q", "flash")]


def test_what_fails_is_kept_with_its_reason_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fake(self: Contender, point: points.Point, setting: str, *, num_threads: int) -> dict[str, Any]:
        asked.append(setting)
        if setting == "flash":
            raise Unavailable("signal 11")
        return {"decode_tok_s": 10.0}

    monkeypatch.setattr(Contender, "measure", fake)
    *_, speeds = speed.measure([OURS], [PEER], points.points_of([ROW]), pairs=2, num_threads=1)
    assert speeds.failures == {("peer q", "flash", ROW.point): "signal 11"}
    assert asked.count("flash") == 1
    cell = speed.compare(speeds, OURS, PEER, ROW)
    assert cell
    assert cell.setting == "plain"


def test_a_quant_measured_in_two_configurations_shows_both() -> None:
    speeds = speed.Speeds()
    for number, kv in enumerate(("fp32", "int8", "int8")):
        values = {"decode_tok_s": 1.0, "quant": "int8", "kv": kv, "threads": 2}
        speeds.samples.append(speed.Sample((number, ""), ROW.point, OURS, "default", values))
    assert speed.configuration(speeds, OURS) == {"quant": ["int8"], "kv": ["fp32", "int8"], "threads": [2]}


def test_rows_of_one_prompt_share_a_process() -> None:
    rows = points.rows_of(["prefill", "decode", "streams"], longest=3072)
    found = {(point.prompt, point.streams): point for point in points.points_of(rows)}
    assert len(found) == 8
    assert [row.label for row in found[1024, 1].rows] == ["prefill 1024", "decode at 1024"]
    assert found[2048, 1].decode == 1
    assert sum(len(point.rows) for point in found.values()) == len(rows) == 10


def test_tables_name_ratios_and_what_is_not_to_be_had() -> None:
    text = report.render(filled_report(), is_markdown=True)
    assert "| decode at 128 | 30.0 | 1.50 |" in text
    assert "* other <int4>: exit code 1: no such version" in text


def test_the_picture_is_svg_with_a_bar_for_each_engine() -> None:
    root = ET.fromstring(plot.svg(filled_report()))
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"decode at 128, tokens/s", "edgeqwen int8", "peer q", "30.0", "20.0"} <= set(texts)


def test_a_program_that_fails_says_its_last_words() -> None:
    with pytest.raises(Unavailable, match="exit code 3: disk is full"):
        run([sys.executable, "-c", "import sys; print('disk is full', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(Unavailable, match="nothing that can be read"):
        run_json([sys.executable, "-c", "pass"])


def test_every_peer_has_a_runner_and_forms_of_different_names() -> None:
    for peer in PEERS:
        assert Path(base.__file__).with_name(f"{peer.runner}.py").exists()
        names = [form.name for form in peer.forms]
        assert len(names) == len(set(names))


def test_a_runner_counts_every_stream_and_leaves_the_first_round_out() -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []

    class Engine:
        def prefill(self, tokens: base.Tokens) -> None:
            calls.append(("prefill", tokens.shape))

        def decode(self, tokens: base.Tokens) -> None:
            calls.append(("decode", tokens.shape))

        def close(self) -> None:
            calls.append(("close", ()))

    given = argparse.Namespace(model="m", prompt=8, decode=2, streams=3, repeats=1)
    found = base._bench(lambda model, given, *, capacity, streams: Engine(), given)
    once = [("prefill", (3, 8)), ("decode", (3,)), ("decode", (3,))]
    assert calls == [*once, *once, ("close", ())]
    assert found["prefill_tok_s"] > 0


def test_the_default_number_of_threads_is_held_against_the_best() -> None:
    def runs(prefill: float, decode: float) -> list[dict[str, Any]]:
        return [{"threads": 2, "prefill_tok_s": prefill, "decode_tok_s": decode}]

    found = threads.verdict({threads.DEFAULT: runs(90, 20), 1: runs(50, 25), 2: runs(110, 20), 3: runs(125, 20)})
    assert found["default_share_of_best"] == {"prefill_tok_s": 0.8, "decode_tok_s": 0.8}
    assert found["prefill_tok_s"] == {"default": 100, "1": 50, "2": 100, "3": 125}
    assert not found["is_default_good"]


def test_memory_and_processor_time_of_a_process_are_read_from_the_kernel() -> None:
    own = memory(os.getpid())
    assert own.peak >= own.resident >= own.private > 1 << 20
    assert cpu_s(os.getpid()) > 0
