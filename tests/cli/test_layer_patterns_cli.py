"""Commands with a pattern of layers: what they print, and which of them take one encoding only."""

from __future__ import annotations

import csv
import io

import pytest
from conftest import run_here
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from refusal import refusal

from fairseq_rpe.figures.style import add_legend, assign_looks, shorten_patterns
from fairseq_rpe.reports.chapters.training import _layer_facts
from fairseq_rpe.runs.settings import RunSettings
from fairseq_rpe.utils.table import Cell, Table, TableRow


def test_verdict_names_layers_and_decides_on_the_model():
    said = run_here("verdict", "2*alibi|nope", "--heads", "2", "--layers", "8").stdout
    assert "layers 0-1, 3-4, 6-7 (alibi) head 1 " in said and "layers 2, 5 (nope) head 1-2" in said
    assert "all 8 layers together: diverges, layers 2, 5\n" in said
    said = run_here("verdict", "rope:local=512", "--heads", "2", "--layers", "12").stdout
    assert "all 12 layers are local: an output depends on at most 6133 tokens" in said
    said = run_here("verdict", "nope|end=alibi", "--heads", "2").stdout  # one period and the last layer
    assert "layer 0 (nope)" in said and "layer 1 (alibi)" in said


def test_receptive_fields_of_a_pattern(tmp_path):
    said = run_here("trf", "alibi:local=9|type1:local=5", "--heads", "2", "--layers", "4", "--out", tmp_path / "trf")
    assert "an output depends on at most 25 tokens" in said.stdout
    rows = list(csv.DictReader((tmp_path / "trf" / "trf.csv").open(encoding="utf-8")))
    assert {row["layer"] for row in rows} == {"0, 2 (alibi:local=9)", "1, 3 (type1:local=5)"}


def test_bias_of_each_encoding():
    rows = list(csv.reader(io.StringIO(run_here("bias", "2*alibi|nope", "--heads", "2", "--length", "2").stdout)))
    assert rows == [
        ["encoding", "distance", "head1", "head2"],
        ["alibi", "0", "0.0", "0.0"],
        ["alibi", "1", "-0.0625", "-0.00390625"],
        ["nope", "0", "0.0", "0.0"],
        ["nope", "1", "0.0", "0.0"],
    ]


def test_backends_of_a_pattern():
    said = run_here("list", "--backends", "2*alibi|shaw:values=true").stdout
    assert "| 2*alibi\\|shaw:values=true | yes " in said and "(1) shaw:values=true: needs all scores" in said
    assert "SPEC belongs to --backends" in refusal("list", "alibi")


REFUSED = {
    ("verdict", "2*alibi|nope", "--layers", "2"): "more layers than the 2 of the model",
    ("verdict", "--formula", "-n", "--layers", "2"): "--layers applies to a SPEC",
    ("verdict", "2*alibi|"): "a part is empty",
    ("bias", "2*alibi|nopo"): "unknown encoding 'nopo'",
    ("fire-fit", "2*alibi|nope"): "is a pattern of layers, and one encoding is expected here",
    ("bench", "--encodings", "2*alibi|nope"): "is a pattern of layers, and bench takes one encoding",
}


@pytest.mark.parametrize("command", REFUSED, ids=" ".join)
def test_refusals(command):
    assert REFUSED[command] in refusal(*command)


def test_reports_list_the_layers_of_each_encoding():
    settings = RunSettings(arch="tiny", extra=("--decoder-layers", "6"))
    assert _layer_facts(["alibi", "2*alibi|nope"], settings) == [
        ("layers of 2*alibi|nope", "0-1, 3-4: alibi; 2, 5: nope")
    ]
    assert _layer_facts(["alibi|nope"], RunSettings(arch="tiny")) == [("layers of alibi|nope", "0: alibi; 1: nope")]
    assert _layer_facts(["alibi|nope"], RunSettings(arch="mine")) == []


def test_long_patterns_are_short_in_legends():
    pattern, other = (f"3*rope:base=500000,local=128|nope:query_scale={scale}" for scale in ("ssmax", "logn"))
    assert shorten_patterns([pattern, "alibi"])[pattern] == "3*rope+…|nope+…"
    assert shorten_patterns([pattern, other]) == {pattern: pattern, other: other}  # short ones would be equal
    assert shorten_patterns(["3*rope:local=64|nope"]) == {"3*rope:local=64|nope": "3*rope:local=64|nope"}
    figure = Figure()
    add_legend(figure, handles=[Line2D([], [], label=label) for label in (pattern, "alibi")])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["3*rope+…|nope+…", "alibi"]
    assert len(set(assign_looks(["rope", "rope|nope", "3*rope|nope", "nope"]).values())) == 4


def test_bars_in_tables():
    table = Table("of 2*alibi|nope", ["encoding", "n"], [TableRow("2*alibi|nope", [Cell("1")])])
    assert r"| 2*alibi\|nope |" in table.to_markdown()
    assert r"2*alibi\textbar{}nope &" in table.to_latex()
    assert "2*alibi|nope,1" in table.to_csv()
