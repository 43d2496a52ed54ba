"""Spec strings, the registry, forms and the direction of imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused

from fairseq_rpe import algorithms, core, encodings, positions
from fairseq_rpe.cli.printing import decimals
from fairseq_rpe.core import DenseBias, PairBias, Positions, Registry, ToeplitzBias, configure, option, parse
from fairseq_rpe.core.renamed import SPEC_OPTIONS
from fairseq_rpe.utils.table import Cell, Table, TableRow, cell_with_range, number_cell


@dataclass(frozen=True)
class Example:
    rate: float | None = option(None, "a rate", above=0, maximum=1)
    count: int = option(3, "a count", minimum=1)
    mode: str = option("fast", "a mode", choices=("fast", "exact"))
    flag: bool = option(False, "a flag")
    size: float | Literal["auto"] = option("auto", "a size", above=0)


def test_parse_and_configure():
    name, given = parse(" demo:rate=1/4, count=5,flag=true ")
    config = configure(Example, name, given)
    assert (name, config) == ("demo", Example(rate=0.25, count=5, flag=True))
    assert core.canonical(name, config) == "demo:rate=0.25,count=5,flag=true"
    assert core.canonical("demo", Example()) == "demo"
    assert configure(Example, "demo", {"rate": "none"}).rate is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(0, exclude_min=True, allow_infinity=False) | st.fractions(0, max_denominator=99).filter(bool))
def test_a_spelling_is_the_same_number(value):
    config = configure(Example, "demo", {"size": str(value)})
    assert config.size == pytest.approx(float(value), rel=1e-15)
    assert configure(Example, *parse(core.canonical("demo", config))) == config


BAD = {
    "incomplete": " demo:",
    "'rate' is not key=value": "demo:rate",
    "given twice": "demo:count=1,count=2",
    "did you mean 'count'": "demo:cuont=1",
    "a whole number, not 'x'": "demo:count=x",
    "at least 1, not 0": "demo:count=0",
    "more than 0, not 0": "demo:rate=0",
    "at most 1, not 2": "demo:rate=2",
    "a number, not '(nan|1/0)'": "demo:rate=nan demo:rate=1/0",
    "did you mean 'fast'": "demo:mode=fsat",
    "true or false": "demo:flag=maybe",
    "a number or auto, not 'none'": "demo:size=none",
}


@pytest.mark.parametrize(("words", "specs"), BAD.items())
def test_bad_specs_are_one_line(words, specs):
    for spec in specs.split(" "):
        with refused(words):
            configure(Example, *parse(spec))


def test_a_renamed_option_is_refused_with_its_new_name(monkeypatch):
    monkeypatch.setitem(SPEC_OPTIONS, ("demo", "number"), "count")
    with refused("'demo' has no option 'number': it is called 'count' now"):
        configure(Example, *parse("demo:number=1"))
    monkeypatch.setitem(SPEC_OPTIONS, ("demo", "number"), "removed")  # not an option of the class with this name
    with refused("'demo' has no option 'number'; its options and defaults: "):
        configure(Example, *parse("demo:number=1"))
    for (name, old), new in SPEC_OPTIONS.items():
        for package in (algorithms, encodings, positions):
            if name in package.names():
                with refused(f"'{name}' has no option '{old}': it is called '{new}' now"):
                    package.normalise(f"{name}:{old}=1")


def test_registry_refuses_duplicates_and_suggests():
    registry = Registry("thing", "no.such.group")
    one, two = (type(name, (), {"Config": Example}) for name in ("One", "Two"))
    registry.register("alpha")(one)
    registry.register("alpha")(one)  # the same object again is no duplicate
    with refused("registered twice"):
        registry.register("alpha")(two)
    with refused("unknown thing 'alhpa'.*did you mean 'alpha'.*known: alpha"):
        registry.get("alhpa")


def test_a_number_that_is_rounded_to_zero_has_no_minus():
    assert [number_cell(x, ".3f").text for x in (-4e-4, -0.0, 4e-4, -6e-4)] == ["0.000", "0.000", "0.000", "-0.001"]
    assert [number_cell(x, "+.3f").text for x in (-4e-4, 4e-4, -6e-4)] == ["0.000", "+0.000", "-0.001"]
    assert cell_with_range(-4e-4, ".3f", [-4e-4, 4e-4]).text == "0.000 (0.000 to 0.000)"
    assert number_cell(-4e-4, ".3f").value == -4e-4  # CSV has the exact number
    assert [decimals(x, 3) for x in (-4e-4, -1234.5, None)] == ["0.000", "-1,234.500", ""]


def test_a_table_in_latex_is_escaped_ruled_and_has_its_caption():
    cells = [Cell("-0.50", -0.5, best=True), Cell("48.50", 48.5, note="47.1–49.2")]
    rows = [TableRow("inv_n & co", cells, note="50 %"), TableRow("{a}^b~c$#\\", [Cell("1e-5"), Cell("−2")])]
    table = Table("Σ exp(bias) at ε ≤ 5 %, 64×.", ["", "a_b", "ratio"], rows, best_label="least", groups=["L & 2 L"])
    text = table.to_latex()
    lines = text.splitlines()
    assert lines[:2] == [r"\begin{table}", r"\centering"] and lines[-1] == r"\end{table}" and text.isascii()
    assert [line for line in lines if "rule" in line] == [r"\toprule", r"\midrule", r"\bottomrule"]
    caption = r"\caption{$\Sigma$ exp(bias) at $\varepsilon$ $\leq$ 5 \%, 64$\times$. Bold: least of its column.}"
    parts = [r"\multicolumn{2}{c}{L \& 2 L} \\", r"\begin{tabular}{lrr}", r"\textbf{$-$0.50}", "1e-5", "$-$2"]
    parts += [r"\shortstack[l]{inv\_n \& co\\ \scriptsize 50 \%}", r"\shortstack[r]{48.50\\ \scriptsize 47.1--49.2}"]
    parts += [r"\{a\}\^{}b\textasciitilde{}c\$\#\textbackslash{}"]
    assert lines[2] == caption and all(part in text for part in parts)


def test_forms_agree():
    table = torch.randn(2, 9, dtype=torch.float64)
    pos = Positions.arange(4, 9, dtype=torch.float64)
    distance = (pos.q[0, :, None] - pos.k[0]).clamp_min(0).long()
    expected = table[:, distance][None]
    pair = PairBias(lambda i, j, t: t[:, (i[0, :, None] - j[0]).clamp_min(0).long()][None], (table,))
    for form in (ToeplitzBias(table), pair, DenseBias(expected)):
        assert torch.equal(form.materialize(pos), expected)
        assert torch.equal(form.materialize(pos, slice(1, 3), slice(0, 7)), expected[:, :, 1:3, :7])
