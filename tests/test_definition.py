"""Definition 0.1 in a sweep's report: deviations, two-by-two tables and the range of δ in which they agree."""

from __future__ import annotations

import csv
import io

import pytest

from fairseq_rpe.analysis.extrapolation import agreeing
from fairseq_rpe.cli import definition
from fairseq_rpe.cli.definition import CONVERGES, DIVERGES, NONE, UNDECIDED, Prediction

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
    "moved": Prediction(NONE),
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
    assert "5 of 8 heads do not converge" in text and "positions are moved" in text
    same = definition.markdown(judged(("flat", "steep")), 64, 0.05)
    assert "agree for every method if 0.020 < δ <= 0.200" in same and "One-sided, the table is the same" in same
    assert "Only one kind of series" in definition.markdown(judged(("flat", "better")), 64, 0.05)
    assert definition.markdown([], 64, 0.05) == ""


def test_undecided_is_its_own_row_and_csv_has_signed_and_absolute_deviation():
    rows = [{"encoding": "odd", "length": n, "ppl": p, "seed": 1} for n, p in ((64, 10.0), (128, 9.0))]
    found = definition.judge(rows, 64, {"odd": Prediction(UNDECIDED, 0, 4)})
    assert cells(definition._two_by_two(found, 0.05, False))["undecided"] == ["0", "1: odd"]
    [line] = csv.DictReader(io.StringIO(definition.to_csv(found, 0.05)))
    assert float(line["largest_deviation"]) == pytest.approx(0.1) and float(line["end_deviation"]) == pytest.approx(
        -0.1
    )
    assert line["worst_rise"] == "0.0" and (line["extrapolates"], line["extrapolates_one_sided"]) == ("no", "yes")


def test_methods_without_the_training_length_or_without_more_are_left_out():
    rows = [{"encoding": "flat", "length": n, "ppl": 1.0, "seed": 1} for n in (128, 256)]
    assert definition.judge(rows, 64, SAID) == []
    assert definition.judge([{"encoding": "flat", "length": 64, "ppl": 1.0, "seed": 1}], 64, SAID) == []


@pytest.mark.parametrize("text", ["0", "-0.1", "nan", "inf", "x"])
def test_delta_is_a_positive_number(text):
    import argparse

    with pytest.raises(argparse.ArgumentTypeError, match="not a relative deviation above 0"):
        definition.delta(text)
