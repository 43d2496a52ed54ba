"""Definition 0.1 in a sweep's report: deviations, two-by-two tables and the range of δ in which they agree."""

from __future__ import annotations

import csv
import io

import pytest
import torch
from conftest import p_of_heads, save_checkpoint

from fairseq_rpe.analysis.convergence import CONVERGES, DIVERGES, UNDECIDED
from fairseq_rpe.analysis.extrapolation import agreeing
from fairseq_rpe.cli import definition, report
from fairseq_rpe.cli.definition import NONE, Prediction
from fairseq_rpe.cli.trained import load_encodings
from fairseq_rpe.core import UserError

PPL = {
    "flat": {64: 50.0, 128: 49.5, 256: 49.0},  # -2 % at the end
    "better": {64: 50.0, 128: 47.0, 256: 46.0},  # -8 %
    "slow": {64: 50.0, 128: 51.0, 256: 52.0},  # +4 %
    "steep": {64: 50.0, 128: 60.0, 256: 55.0},  # +20 % in between
    "moved": {64: 50.0, 128: 50.0, 256: 50.0},
}
SAID = {
    "flat": Prediction(CONVERGES, 8, 8),
    "better": Prediction(CONVERGES, 8, 8),
    "slow": Prediction(DIVERGES, 3, 8),
    "steep": Prediction(DIVERGES, 0, 8),
    "moved": Prediction(NONE, why="positions are moved"),
}


def judged(names=tuple(PPL)):
    rows = [
        {"encoding": name, "length": n, "ppl": ppl, "seed": 1, "ratio": None}
        for name in names
        for n, ppl in PPL[name].items()
    ]
    return definition.judge(rows, 64, SAID)


def cells(text):
    """The lines of the first Markdown table after the word 'columns' or 'one-sided'."""
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines}


def test_agreement_is_exact_at_its_borders():
    assert agreeing([0.03], [0.07]) == (0.03, 0.07)
    assert agreeing([0.07], [0.07]) is None and agreeing([0.08], [0.07]) is None
    low, high = agreeing([0.0], [0.2])
    assert (low, high) == (0.0, 0.2)


@pytest.mark.parametrize(
    ("limit", "stays", "leaves", "slow_stays"),
    [(0.05, "1: flat", "1: better", True), (0.1, "2: flat, better", "0", True), (0.03, "1: flat", "1: better", False)],
)
def test_two_by_two_counts_improvements_as_the_definition_does(limit, stays, leaves, slow_stays):
    table = cells(definition._two_by_two(judged(), limit, one_sided=False))
    assert table["converges"] == [stays, leaves]
    assert table["diverges"] == (["1: slow", "1: steep"] if slow_stays else ["0", "2: slow, steep"])
    assert table["no prediction"] == ["1: moved", "0"]
    free = cells(definition._two_by_two(judged(), limit, one_sided=True))
    assert free["converges"] == ["2: flat, better", "0"]


def test_text_names_the_deltas_at_which_theory_and_observation_agree():
    text = definition.markdown(judged(), 64, 0.05)
    assert "There is no δ" in text  # better deviates by 0.08, slow only by 0.04
    assert "agree for every method if 0.000 < δ <= 0.040" in text  # one-sided
    assert "0.080" in text and "-0.080" in text and "+0.100" in text
    assert "diverges (5 of 8 heads)" in text and "positions are moved" in text
    same = definition.markdown(judged(("flat", "steep")), 64, 0.05)
    assert "agree for every method if 0.020 < δ <= 0.200" in same and "One-sided, the table is the same" in same
    assert "Only one kind of series" in definition.markdown(judged(("flat", "better")), 64, 0.05)
    assert definition.markdown([], 64, 0.05) == ""


def test_borders_that_are_close_are_told_apart():
    assert definition._told_apart(0.0, 0.04) == ("0.000", "0.040")
    assert definition._told_apart(0.0, 0.00034) == ("0.0000", "0.0003")
    assert definition._told_apart(0.1, 0.1 + 1e-16) == (repr(0.1), repr(0.1 + 1e-16))


def test_undecided_is_its_own_row_and_csv_has_signed_and_absolute_deviation():
    rows = [{"encoding": "odd", "length": n, "ppl": p, "seed": 1} for n, p in ((64, 10.0), (128, 9.0))]
    found = definition.judge(rows, 64, {"odd": Prediction(UNDECIDED, 0, 4)})
    assert cells(definition._two_by_two(found, 0.05, False))["undecided"] == ["0", "1: odd"]
    [line] = csv.DictReader(io.StringIO(definition.to_csv(found, 0.05)))
    assert float(line["largest_deviation"]) == pytest.approx(0.1) and float(line["end_deviation"]) == pytest.approx(
        -0.1
    )
    assert line["worst_rise"] == "0.0" and (line["extrapolates"], line["extrapolates_one_sided"]) == ("no", "yes")


def test_predictions_come_from_the_parameters_that_were_learned(tmp_path):
    plain = {"positions_train": "identity", "positions_eval": None}
    state = {
        "encodings": ["far", "near", "mixed", "t5_bias", "moved", "absent", "alien"],
        "seeds": [1, 2],
        "methods": {
            "far": {"rpe": "kerple_log:p=2", **plain},
            "near": {"rpe": "kerple_log:p=3", **plain},
            "mixed": {"rpe": "kerple_log:p=4", **plain},
            "moved": {"rpe": "alibi", "positions_train": "identity", "positions_eval": "interpolate"},
            "alien": {"rpe": "alien:x=1", **plain},
        },
    }

    def folder(name, seed):
        return tmp_path / "runs" / report.run_name(report.method_of(state, name), seed)

    for seed in (1, 2):
        save_checkpoint(folder("far", seed), "kerple_log:p=2", change=p_of_heads(1.1, 1.2, 1.3, 4.0))
        save_checkpoint(folder("near", seed), "kerple_log:p=3", change=p_of_heads(0.9, 0.2, 0.3, 0.4))
    save_checkpoint(folder("mixed", 1), "kerple_log:p=4", layers=2, change=p_of_heads(1.1, 0.9, 1.2, 1.3))
    save_checkpoint(folder("t5_bias", 1), "t5_bias")
    save_checkpoint(folder("moved", 1), "alibi")
    (folder("alien", 1) / "checkpoints").mkdir(parents=True)
    (folder("alien", 1) / "checkpoints" / "checkpoint_last.pt").write_bytes(b"")
    found = definition.predict(tmp_path, state)
    assert {name: (p.verdict, p.converging, p.heads) for name, p in found.items()} == {
        "far": (CONVERGES, 8, 8),
        "near": (DIVERGES, 0, 8),
        "mixed": (DIVERGES, 6, 8),
        "t5_bias": (DIVERGES, 0, 4),
        "moved": (NONE, 0, 0),
        "alien": (NONE, 0, 0),
    }
    assert str(found["mixed"]) == "diverges (2 of 8 heads)" and "--rpe-module" in str(found["alien"])


@pytest.mark.parametrize(("spec", "layers"), [("kerple_power", 1), ("fire", 3), ("alibi", 1)])
def test_encodings_of_a_checkpoint_are_those_that_were_saved(spec, layers, tmp_path):
    path, made = save_checkpoint(tmp_path, spec, layers, positions_train="offset")
    found = load_encodings(path)
    assert (found.spec, found.train_length, found.positions) == (spec, 64, "offset")
    assert len(found.encodings) == layers
    for got, expected in zip(found.encodings, made, strict=True):
        assert torch.equal(got.profile(20), expected.profile(20)) and not got.training


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    other, _ = save_checkpoint(tmp_path / "a", "alibi")
    torch.save({"cfg": {"model": {"_name": "transformer_lm"}}, "model": {}}, other)
    with pytest.raises(UserError, match="is not of this plugin .its model is 'transformer_lm'"):
        load_encodings(other)
    path, _ = save_checkpoint(tmp_path / "b", "kerple_log")
    state = torch.load(path)
    state["cfg"]["model"]["rpe"] = "fire"
    torch.save(state, path)
    with pytest.raises(UserError, match="holds other parameters than 'fire' has"):
        load_encodings(path)


def test_methods_without_the_training_length_or_without_more_are_left_out():
    rows = [{"encoding": "flat", "length": n, "ppl": 1.0, "seed": 1} for n in (128, 256)]
    assert definition.judge(rows, 64, SAID) == []
    assert definition.judge([{"encoding": "flat", "length": 64, "ppl": 1.0, "seed": 1}], 64, SAID) == []
