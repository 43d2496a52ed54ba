"""The report on perplexities that no sweep has measured: a sweep's files, from results alone."""

from __future__ import annotations

import csv
import math

import pytest
from pages import skip_drawing
from refusal import refused

from fairseq_rpe import build
from fairseq_rpe.evaluation.records import TextResult
from fairseq_rpe.reports.external_results import write_report


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch) -> None:
    skip_drawing(monkeypatch)


def results(ppl, data="d", lengths=(64, 128, 256), **more) -> list[TextResult]:
    of = {"checkpoint": "c", "data": data, "split": "test", "tokens": 1000, "loss_base2": 3.0, **more}
    return [TextResult(length=n, ppl=p, **of) for n, p in zip(lengths, ppl, strict=True)]


def test_files_and_numbers(tmp_path):
    rows = {"ALiBi": results((10.0, 9.9, 9.8), encoding="alibi"), "rope": results((9.5, 19.0, 38.0), encoding="rope")}
    encodings = {name: [build(own[0].encoding, 4, 32)] for name, own in rows.items()}
    section = write_report(rows, tmp_path / "out", 64, encodings=encodings, title="Two models")
    names = {"results.csv", "results.md", "ppl.png", "ppl.pdf", "report.html", "extrapolation.csv"}
    names |= {"effective_length.csv"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    with open(tmp_path / "out/results.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [(r["encoding"], int(r["length"]), float(r["ppl"])) for r in found] == [
        (name, one.length, one.ppl) for name, own in rows.items() for one in own
    ]
    assert [float(r["ratio"]) for r in found] == pytest.approx([1.0, 0.99, 0.98, 1.0, 2.0, 4.0])
    page = (tmp_path / "out/report.html").read_text()
    assert "Two models" in page and "Does it extrapolate?" in page and "converges" in page and "diverges" in page
    assert "| ALiBi" in section.text and "report.html" in section.text
    with open(tmp_path / "out/extrapolation.csv", newline="") as file:
        said = {row["encoding"]: (row["prediction"], row["extrapolates"]) for row in csv.DictReader(file)}
    assert said == {"ALiBi": ("converges", "yes"), "rope": ("diverges", "no")}


def test_moved_positions_have_no_verdict(tmp_path):
    rows = {"moved": results((10.0, 9.9, 9.8), encoding="alibi", positions="interpolate:ratio=0.5")}
    text = write_report(rows, tmp_path, 64, encodings={"moved": [build("alibi", 4, 32)]}).text
    assert "positions are transformed" in text


USUAL = results((1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": {}}, "there are no results"),
        ({"rows": {"a": []}}, "there are no results"),
        ({"rows": {"a": USUAL, "b": results((1, 2, 3), data="e")}}, "different texts"),
        ({"rows": {"a": results((1, 2, 3), lengths=(64, 64, 128))}}, "two results of one length"),
        # a perplexity that no model can have
        *(
            ({"rows": {"a": results((10.0, ppl, 9.0))}}, "'a'.*ppl.*128.*at least 1")
            for ppl in (math.nan, math.inf, 0.5)
        ),
        ({"train_length": 0}, "train_length must be .* 1, not 0"),
        ({"train_length": 64.0}, "train_length must be an integer"),
        ({"delta": 0.0}, "delta must be .* above 0"),
        ({"delta": math.nan}, "delta must be a finite number"),
        ({"width": "huge"}, "width must be one of 'column', 'page' or None, not 'huge'"),
        ({"rows": None}, "rows must be a dict .* not None"),
        ({"rows": {5: USUAL}}, "a key of rows must be a string .* not 5"),
        ({"rows": {"a": None}}, "results of 'a' must be a list .* not None"),
        ({"rows": {"a": results((1, 2, 3), loss_base2=-1.0)}}, "'a'.*loss_base2.*at least 0"),
        ({"encodings": {"b": []}}, "encodings has 'b'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given, words, tmp_path):
    with refused(words):
        write_report(**{"rows": {"a": USUAL}, "train_length": 64, **given}, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sweeps_report_is_not_replaced(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    with refused("is the folder of a sweep"):
        write_report({"a": USUAL}, tmp_path, 64)
