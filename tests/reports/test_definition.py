"""Definition 0.1 in a sweep's report: deviations, two-by-two tables and the range of δ in which they agree."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from conftest import p_of_heads, save_checkpoint
from refusal import refused

from fairseq_rpe.analysis.convergence import CONVERGES, DIVERGES, UNDECIDED
from fairseq_rpe.analysis.extrapolation import deviation, separating_deltas
from fairseq_rpe.data.folder import unigram_ppl
from fairseq_rpe.evaluation.records import Buckets, TextResult
from fairseq_rpe.reports import extrapolation_definition
from fairseq_rpe.reports.extrapolation_definition import NONE, PredictedVerdict
from fairseq_rpe.reports.page import markdown
from fairseq_rpe.reports.sweep_results import Perplexities, SweepResult
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord, SweepSettings

PPL = {
    "flat": {64: 50.0, 128: 49.5, 256: 49.0},  # -2 % at the end
    "better": {64: 50.0, 128: 47.0, 256: 46.0},  # -8 %
    "slow": {64: 50.0, 128: 51.0, 256: 52.0},  # +4 %
    "steep": {64: 50.0, 128: 60.0, 256: 55.0},  # +20 % in between
    "moved": {64: 50.0, 128: 50.0, 256: 50.0},
}
SAID = {
    **dict.fromkeys(("flat", "better"), PredictedVerdict(CONVERGES, 8, 8)),
    "slow": PredictedVerdict(DIVERGES, 3, 8),
    "steep": PredictedVerdict(DIVERGES, 0, 8),
    "moved": PredictedVerdict(NONE, reason="positions are transformed"),
}


def result(length: int, ppl: float, **more) -> TextResult:
    return TextResult(length=length, ppl=ppl, checkpoint="c", split="test", tokens=9, loss_base2=1.0, **more)


def found(ppl):
    """The perplexities of a sweep at 64 tokens."""
    return Perplexities([SweepResult(name, 1, result(n, p)) for name, own in ppl.items() for n, p in own.items()], 64)


def judged(names=tuple(PPL)):
    return extrapolation_definition.observe_verdicts(found({name: PPL[name] for name in names}), SAID)


def cells(table):
    """What a table shows, by row."""
    return {row.name: [cell.text for cell in row.cells] for row in table.rows}


def test_agreement_is_exact_at_its_borders():
    assert separating_deltas([0.03], [0.07]) == (0.03, 0.07) and separating_deltas([0.0], [0.2]) == (0.0, 0.2)
    assert separating_deltas([0.07], [0.07]) is None and separating_deltas([0.08], [0.07]) is None


def test_signs_and_sides():
    up_and_down = deviation({64: 50.0, 128: 55.0, 256: 40.0, 32: 900.0}, 64)
    assert (up_and_down.largest, up_and_down.worst, up_and_down.end) == pytest.approx((0.2, 0.1, -0.2))
    assert up_and_down.extrapolates(0.2001) and not up_and_down.extrapolates(0.2)
    assert up_and_down.extrapolates(0.11, one_sided=True) and not up_and_down.extrapolates(0.1, one_sided=True)
    falling = deviation({64: 50.0, 128: 45.0}, 64)
    assert (falling.worst, falling.end) == (0.0, pytest.approx(-0.1))
    for ppl, where in (({128: 50.0}, "at"), ({64: 50.0, 32: 60.0}, "beyond")):
        with refused(f"no perplexity {where} the training length of 64"):
            deviation(ppl, 64)


def test_published_methods_improve_by_a_tenth_and_divergent_series_do_not():
    values = recipes.load("extrapolation-wikitext103").published.values
    found = {name: deviation({int(n): v for n, v in own.items()}, 512) for name, own in values.items()}
    for name in ("alibi", "kerple_log", "kerple_power", "sandwich", "type1", "type2"):
        assert 0.06 < found[name].largest < 0.11 and found[name].worst == 0 and found[name].end < 0
        assert not found[name].extrapolates(0.05) and found[name].extrapolates(0.05, one_sided=True)
    assert found["inv_nlnn"].largest == pytest.approx(0.121, abs=5e-4)
    assert found["inv_n"].largest == pytest.approx(1.37, abs=5e-3) and found["sinusoidal"].end > 16


@pytest.mark.parametrize(
    ("limit", "stays", "leaves", "slow_stays"),
    [(0.05, "1: flat", "1: better", True), (0.1, "2: flat, better", "0", True), (0.03, "1: flat", "1: better", False)],
)
def test_two_by_two_counts_improvements_as_the_definition_does(limit, stays, leaves, slow_stays):
    table = cells(extrapolation_definition.agreement_table(judged(), limit, one_sided=False))
    assert table["converges"] == [stays, leaves]
    assert table["diverges"] == (["1: slow", "1: steep"] if slow_stays else ["0", "2: slow, steep"])
    assert table["no prediction"] == ["1: moved", "0"]
    free = cells(extrapolation_definition.agreement_table(judged(), limit, one_sided=True))
    assert free["converges"] == ["2: flat, better", "0"]


def test_text_names_the_deltas_at_which_theory_and_observation_agree():
    def said(names=tuple(PPL)):
        return markdown(extrapolation_definition.definition_blocks(judged(names), 64, 0.05))

    text = said()
    assert "There is no δ" in text  # better deviates by 0.08, slow only by 0.04
    assert "agree for every method if 0.000 < δ ≤ 0.040" in text  # one-sided
    assert "0.080" in text and "-0.080" in text and "+0.100" in text
    assert "diverges (5 of 8 heads)" in text and "positions are transformed" in text
    same = said(("flat", "steep"))
    assert "agree for every method if 0.020 < δ ≤ 0.200" in same and "The one-sided table is the same" in same
    assert "There is only one kind of series" in said(("flat", "better"))
    assert extrapolation_definition.definition_blocks([], 64, 0.05) == []


def test_borders_that_are_close_are_told_apart():
    for start, low, high, words in (
        (50.0, 50.0, 52.0, "if 0.000 < δ ≤ 0.040."),
        (50.0, 50.0, 50.017, "if 0.0000 < δ ≤ 0.0003."),
        (50.0, 53.01, 60.49, "if 0.061 < δ ≤ 0.209."),  # 0.0602 and 0.2098, rounded into the interval
        (2.0, 3.0, 3.0000000000000004, "if 0.5 < δ ≤ 0.5000000000000002."),
    ):
        ppl = {"flat": {64: start, 128: low}, "slow": {64: start, 128: high}}
        assert extrapolation_definition.describe_agreement(
            extrapolation_definition.observe_verdicts(found(ppl), SAID), False
        ).endswith(words)


def test_undecided_is_its_own_row_and_csv_has_signed_and_absolute_deviation():
    odd = extrapolation_definition.observe_verdicts(
        found({"odd": {64: 10.0, 128: 9.0}}), {"odd": PredictedVerdict(UNDECIDED, 0, 4)}
    )
    assert cells(extrapolation_definition.agreement_table(odd, 0.05, False))["undecided"] == ["0", "1: odd"]
    [line] = csv.DictReader(io.StringIO(extrapolation_definition.verdict_csv(odd, 0.05)))
    assert float(line["largest_deviation"]) == pytest.approx(0.1)
    assert float(line["end_deviation"]) == pytest.approx(-0.1)
    assert line["worst_rise"] == "0.0" and (line["extrapolates"], line["extrapolates_one_sided"]) == ("no", "yes")
    assert (line["prediction"], line["heads_converging"], line["heads"], line["delta"]) == (UNDECIDED, "0", "4", "0.05")


def test_predictions_come_from_the_parameters_that_were_learned(tmp_path):
    named = [Method("far", "kerple_log:p=2"), Method("near", "kerple_log:p=3"), Method("mixed", "kerple_log:p=4")]
    named += [Method("moved", "alibi", positions_eval="interpolate"), Method("alien", "alien:x=1")]
    names = ("far", "near", "mixed", "t5_bias", "moved", "absent", "alien")
    state = SweepRecord(SweepSettings(tokens=64), names, (1, 2), methods={method.name: method for method in named})
    sweep = SweepFolder(tmp_path)

    def folder(name, seed):
        return sweep.run_folder(state.method(name), seed).path

    for seed in (1, 2):
        save_checkpoint(folder("far", seed), "kerple_log:p=2", change=p_of_heads(1.1, 1.2, 1.3, 4.0))
        save_checkpoint(folder("near", seed), "kerple_log:p=3", change=p_of_heads(0.9, 0.2, 0.3, 0.4))
    save_checkpoint(folder("mixed", 1), "kerple_log:p=4", layers=2, change=p_of_heads(1.1, 0.9, 1.2, 1.3))
    save_checkpoint(folder("t5_bias", 1), "t5_bias")
    save_checkpoint(folder("moved", 1), "alibi")
    (folder("alien", 1) / "checkpoints").mkdir(parents=True)
    (folder("alien", 1) / "checkpoints" / "checkpoint_last.pt").write_bytes(b"")
    said = extrapolation_definition.predict_verdicts(sweep, state)
    counts = {"far": (CONVERGES, 8, 8), "near": (DIVERGES, 0, 8), "mixed": (DIVERGES, 6, 8)}
    counts |= {"t5_bias": (DIVERGES, 0, 4), "moved": (NONE, 0, 0), "alien": (NONE, 0, 0)}
    assert {name: (p.verdict, p.converging, p.heads) for name, p in said.items()} == counts
    assert str(said["mixed"]) == "diverges (2 of 8 heads)" and "--rpe-module" in str(said["alien"])


def test_methods_without_the_training_length_or_without_more_are_left_out():
    assert (
        extrapolation_definition.observe_verdicts(found({"flat": {128: 1.0, 256: 1.0}, "slow": {64: 1.0}}), SAID) == []
    )


def under(ppl, unigram=None, loss=None):
    """Two lengths of one model, with what its evaluation recorded at the training length."""
    seen = loss and Buckets((0, 1, 3, 7, 63), loss, (9, 9, 18, 36, 504))
    return [result(64, ppl, unigram_ppl=unigram, positions_loss=seen), result(128, ppl)]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (under(1600.0, 812.0), "its perplexity is 1600.0, and that of symbol frequencies 812.0"),
        (under(600.0, 812.0, (9.0, 9.0, 9.0, 8.99, 8.95)), "its loss is 0.6 % below that of the first 4 tokens"),
        (under(600.0, 812.0, (9.0, 9.0, 9.0, 9.0, 9.1)), "its loss is -1.1 % below"),
        (under(600.0, 812.0, (9.0, 8.8, 8.7, 8.6, 8.5)), ""),
        (under(600.0), ""),
    ],
)
def test_no_verdict_on_a_model_that_does_not_use_its_context(model, why):
    rows = [SweepResult("young", 1, one) for one in model] + [
        SweepResult("young", 2, one) for one in under(500.0, 812.0)
    ]
    [one] = extrapolation_definition.observe_verdicts(
        Perplexities(rows, 64), {"young": PredictedVerdict(CONVERGES, 4, 4)}
    )
    assert one.answers(0.05) == (["no verdict"] * 2 if why else ["yes", "yes"])
    text = markdown(extrapolation_definition.definition_blocks([one], 64, 0.05))
    assert (extrapolation_definition.NO_CONTEXT_VERDICT in text) is bool(why) and why in text
    assert ("Predicted (rows)" in text or "| converges" in text) is not bool(why)
    [line] = csv.DictReader(io.StringIO(extrapolation_definition.verdict_csv([one], 0.05)))
    assert line["extrapolates"] == ("no verdict" if why else "yes")


def test_deviations_show_the_spread_of_seeds():
    values = [(1, 64, 10.0), (1, 128, 11.0), (2, 64, 10.0), (2, 128, 9.0)]
    rows = [SweepResult("a", seed, result(n, p)) for seed, n, p in values]
    judged = extrapolation_definition.observe_verdicts(Perplexities(rows, 64), {"a": PredictedVerdict(CONVERGES, 4, 4)})
    shown = cells(extrapolation_definition.deviation_table(judged, 0.05))["a"]
    assert shown[1:4] == ["0.100 (0.100 to 0.100)", "0.050 (0.000 to 0.100)", "+0.000 (-0.100 to +0.100)"]
    assert not judged[0].deviation.extrapolates(0.05)  # neither of them does, and the table says so
    assert judged[0].deviation.extrapolates(0.06, one_sided=True)


def test_models_without_a_verdict_are_named_in_one_sentence():
    rows = [SweepResult(name, 1, one) for name in ("young", "fresh") for one in under(1600.0, 812.0)]
    judged = extrapolation_definition.observe_verdicts(
        Perplexities(rows, 64), dict.fromkeys(("young", "fresh"), PredictedVerdict(CONVERGES, 4, 4))
    )
    text = markdown(extrapolation_definition.definition_blocks(judged, 64, 0.05))
    assert text.count(extrapolation_definition.NO_CONTEXT_VERDICT) == 1
    assert "young (its perplexity is 1600.0, and" in text and "fresh (its perplexity is 1600.0, and" in text


def test_the_unigrams_perplexity_is_that_of_the_best_fixed_distribution():
    ids = np.array([4, 4, 5, 6], np.uint16)  # entropy 1.5 bits
    assert unigram_ppl(ids) == pytest.approx(2**1.5)
    for other in ([0.5, 0.3, 0.2], [0.4, 0.3, 0.3]):
        assert np.exp(-np.log([other[i - 4] for i in ids]).mean()) > unigram_ppl(ids)
    assert unigram_ppl(np.full(7, 9)) == pytest.approx(1.0)
