"""The command that draws index warping: its table, what each figure holds, options that all act, one-line errors."""

from __future__ import annotations

import csv
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import error_of, run_here

from fairseq_rpe.analysis import rope_raw, sensitivity, total_difference
from fairseq_rpe.analysis.index_warping import (
    WarpSetting,
    interpolate_positions,
    published_trend,
    table_2,
    total_differences,
    warp_positions,
    wave_weights,
)
from fairseq_rpe.cli.main import build_parser
from fairseq_rpe.figures import style, warping
from fairseq_rpe.figures.style import PALETTE
from fairseq_rpe.positions import build
from fairseq_rpe.utils.records import from_attributes

FIGURES, PLAIN = warping.FIGURES, WarpSetting()
ATTENTION = "figure-1-attention-over-distance"
OURS = ("sensitivity-over-position", "sensitivity-at-the-end", "warped-positions", "total-difference")
OVER, AT_END, WARPS, TOTAL = OURS


def names(*figures: str) -> list[str]:
    return sorted([*(f"{name}.{ending}" for name in figures for ending in ("png", "pdf")), "sensitivity.csv"])


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def only(monkeypatch) -> Callable[..., None]:
    """Has the command draw these figures alone."""
    return lambda *kept: monkeypatch.setattr(warping, "FIGURES", {name: FIGURES[name] for name in kept})


def draw(name: str, setting: WarpSetting = PLAIN):
    compute, drawn = FIGURES[name]
    return drawn(setting, compute(setting))


def named(axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(x, y) of every line that the legend names."""
    data = {line.get_label(): tuple(map(np.asarray, line.get_data())) for line in axes.lines}
    return {label: xy for label, xy in data.items() if not label.startswith("_")}


def test_files_table_and_what_is_said(only, tmp_path):
    """For a column and as LaTeX; all of these figures: test_the_smallest_inputs_are_drawn."""
    only(WARPS)
    drawn = tmp_path / "a folder"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        shown = run_here("sensitivity", "--out", drawn, "--train-length", 20, "--width", "column", "--latex").stdout
    assert listed(drawn) == sorted([*names(WARPS), "sensitivity.tex"])
    for path in drawn.iterdir():
        start = {".png": b"\x89PNG", ".pdf": b"%PDF-", ".csv": b"train", ".tex": b""}[path.suffix]
        assert path.read_bytes().startswith(start), path
        assert path.suffix != ".pdf" or b"/MediaBox [ 0 0 234 " in path.read_bytes(), path
    assert r"20 & beta &" in " ".join((drawn / "sensitivity.tex").read_text().split())
    with open(drawn / "sensitivity.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(int(r["train_length"]), int(r["reach"]), r["skew"]) for r in rows] == [
        (length, reach, skew) for length, reach in ((20, 10), (500, 200)) for skew in ("none", "sqrt", "beta")
    ]
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(set(map(len, lines))) == 1
    for row, line in zip(rows, lines[2:], strict=True):
        length = int(row["train_length"])
        for times in (2, 4):
            expected = total_difference(row["skew"], length, times * length, int(row["reach"]), exponential=True)
            assert float(row[f"computed_{times}x"]) == pytest.approx(expected, rel=1e-9)
        cells = [f"{float(row[f'{what}_{t}x']):.3f}" for t in (2, 4) for what in ("computed", "published")]
        assert [cell.strip() for cell in line.strip("|").split("|")] == [row["train_length"], row["skew"], *cells]
        assert (row["width"], row["base"], row["exponential"]) == ("limit", "10000.0", "True")
    assert "500 beta 0.029 0.031 0.013 0.013".split() in [line.replace("|", " ").split() for line in lines]
    assert "gives no head width" in shown
    assert shown.count("both skews lower the sum: yes; beta best at 4x: yes") == 2
    assert f"{drawn / 'sensitivity.csv'}" in shown and f"{drawn / 'warped-positions.png'}" in shown


def test_the_same_numbers_give_the_same_bytes(only, tmp_path):
    only(WARPS)

    def made() -> dict[str, bytes]:
        run_here("sensitivity", "--out", tmp_path / "out")
        return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}  # no temporary files

    assert (first := made()) == made() and sorted(first) == names(WARPS)


def test_the_trend_is_computed():
    for sqrt, beta, expected in (
        ((1, 2), (2, 1), (True, True)),
        ((1, 1), (2, 2), (True, False)),
        ((4, 2), (2, 1), (False, True)),
        ((1, 2), (2, 3), (False, False)),
    ):
        assert published_trend({"none": (3, 3), "sqrt": sqrt, "beta": beta}) == expected
    found = table_2(PLAIN)
    assert [one.train_length for one in found] == [20, 500]
    assert all(published_trend(one.published) == (True, True) for one in found)


def test_a_trend_that_fails_is_said(only, tmp_path, monkeypatch):
    only(WARPS)
    monkeypatch.setattr(style, "save", lambda figure, *paths: [path.touch() for path in paths])
    shown = run_here("sensitivity", "--out", tmp_path, "--head-width", 4, "--base", 10, "--train-length", 20).stdout
    assert "length 20 (c = 10): both skews lower the sum: no; beta best at 4x: yes" in shown
    assert "RoPE, base 10, heads 4 wide, differences of exp(raw attention)" in shown


def test_figure_2_is_attention_in_500_and_in_1000_tokens():
    """The grey zone is what training has not seen."""
    figure = draw("figure-2-raw-attention")
    assert [axes.get_title() for axes in figure.axes] == ["500 tokens", "1000 tokens"]
    short, long = map(named, figure.axes)
    for length, lines in ((500, short), (1000, long)):
        n = torch.arange(length + 1)
        assert all(list(x) == n.tolist() for x, _ in lines.values())
        assert np.allclose(lines["RoPE"][1], rope_raw(n).exp()) and lines["RoPE"][1].min() > math.exp(-1)
        for head in (1, 4, 8):
            assert np.allclose(lines[f"ALiBi, head {head} of 8"][1], np.exp(1 - n.numpy() / 2.0**head))
    (more,) = long.keys() - short.keys()
    assert more == "RoPE, 1000 tokens interpolated to 500"
    assert np.allclose(long[more][1][::2], short["RoPE"][1])
    [zone] = [patch for patch in figure.axes[1].patches if "not seen in training" in patch.get_label()]
    assert (zone.get_x(), zone.get_x() + zone.get_width()) == (500, 1000)
    assert len(set(zone.get_facecolor()[:3])) == 1 and not figure.axes[0].patches


def test_figure_a_has_two_lines_for_each_longer_text():
    figure = draw("figure-A-interpolation")
    found = list(map(named, figure.axes))
    assert [list(lines) for lines in found] == [["100 tokens", "interpolated to 100 tokens"]] * 2
    for (length, step), lines, axes in zip(((200, 2), (500, 5)), found, figure.axes, strict=True):
        (x, own), (far, squeezed) = lines.values()
        assert (len(x) - 1, len(far) - 1) == (100, length) and axes.get_title().startswith(f"{length} tokens")
        assert np.allclose(own, rope_raw(torch.arange(101)).exp()) and np.allclose(squeezed[::step], own)
        assert np.allclose(squeezed, rope_raw(torch.arange(length + 1) / step).exp(), atol=1e-6)
    narrow = named(draw("figure-A-interpolation", WarpSetting(width=64)).axes[0])
    assert np.allclose(narrow["100 tokens"][1], rope_raw(torch.arange(101), 64).exp())


def test_figures_4_and_b_are_the_skews():
    beta, root = (named(draw(name).axes[0]) for name in ("figure-4-beta-cdf", "figure-B-square-root"))
    for lines in (beta, root):
        x, y = lines["no warp"]
        assert list(x) == list(y) and (x[0], x[-1], len(x)) == (0, 1, 501)
    x, y = beta["CDF of Beta(2, 5)"]
    assert np.allclose(y, 1 - (1 - x) ** 6 - 6 * x * (1 - x) ** 5) and (np.diff(y) >= 0).all()
    bend = np.diff(y, 2)
    assert (bend[:98] > 0).all() and (bend[102:] < 0).all()
    (point,) = zip(*beta["convex up to 0.2, concave from there"], strict=True)
    assert point == pytest.approx((0.2, 1 - 2 * 0.8**5))
    assert np.allclose(root["square root"][1] ** 2, root["square root"][0]) and len(root) == 2


def test_rope_stays_above_and_alibi_vanishes():
    (axes,) = draw(ATTENTION).axes
    assert axes.get_xscale() == "log" and "tokens" in axes.get_xlabel()
    assert [line for line in axes.lines if list(line.get_ydata()) == [math.exp(-1)] * 2]
    lines = named(axes)
    assert len(lines) == 7
    for label, (x, y) in lines.items():
        assert x[0] == 1 and x[-1] == 1e5
        assert (y.min() > math.exp(-1)) if label.startswith("RoPE") else (y[-1] < 1e-150 and y[0] > 1.5), label
    assert np.allclose(lines["RoPE, head width 64"][1], rope_raw(torch.tensor(lines["RoPE, wide head"][0]), 64).exp())
    assert "RoPE, head width 96" in named(draw(ATTENTION, WarpSetting(width=96)).axes[0])


def test_interpolation_lowers_and_stretches_the_waves():
    whole, tail = draw(OVER).axes
    training, twice, four = named(tail).values()
    for times, (x, y) in zip((1, 2, 4), (training, twice, four), strict=True):
        assert x[0] == 47 and x[-1] == 0
        expected = sensitivity(interpolate_positions(512, times * 512), exponential=True)[-48:]
        assert np.allclose(y, expected, atol=1e-15)
    assert 1.8 < training[1].max() / twice[1].max() < 2.2 and 1.8 < twice[1].max() / four[1].max() < 2.2
    ends = [y[-1] for _, y in named(whole).values()]
    assert ends[0] / ends[1] == pytest.approx(2, rel=0.02) and ends[1] / ends[2] == pytest.approx(2, rel=0.02)
    for times in (1, 2, 4):
        weights = wave_weights(times)
        assert weights.sum() == pytest.approx(1) and 0 <= weights[0] <= weights[1]
        turned = (torch.arange(len(weights), dtype=torch.float64) / times).cos() @ weights
        assert abs(turned) < 0.01  # a wave is averaged away
    assert all(line.get_xdata()[-1] <= 512 for line in whole.lines)


@pytest.mark.parametrize("length", [20, 500])
def test_the_end_holds_the_terms_of_table_2(length):
    figure = draw(AT_END, WarpSetting(length))
    (row,) = (one for one in table_2(PLAIN) if one.train_length == length)
    for sums, axes in zip(row.sums.values(), figure.axes, strict=True):
        training, *tests = named(axes).values()
        assert list(training[0]) == list(range({20: 10, 500: 200}[length], -1, -1))
        assert axes.get_xlim()[0] > training[0][0] and axes.get_xlim()[1] < 0  # the last token is at the right
        for times, computed, (_, y) in zip((2, 4), sums.tolist(), tests, strict=True):
            total = np.abs(training[1] - y).sum()
            assert total == pytest.approx(computed)
            assert f"{total:.3g} at {times}×" in axes.get_title()
    (_, training), (_, twice), (_, four) = named(figure.axes[1]).values()  # of sqrt
    assert abs(training[-1] - twice[-1]) < 0.1 * abs(training[-1] - four[-1])  # the slope of sqrt at its end is 1/2


def test_warps_are_what_training_does():
    lines = named(*draw(WARPS).axes)
    index = torch.arange(512, dtype=torch.float64)[None]
    generator = torch.Generator().manual_seed(0)
    specs = {"identity": "identity", "tail, sqrt": "warp:head=0,tail=1,skew=sqrt", "tail, beta": "warp:head=0,tail=1"}
    specs |= {f"head, α = 1/{n}": f"warp:head=1,tail=0,alpha=1/{n}" for n in (2, 4, 6, 8)}
    assert lines.keys() == specs.keys()
    for label, spec in specs.items():
        moved = build(spec, 512)(index, torch.tensor([512]), generator).k[0]
        assert np.allclose(lines[label][1][:-1], moved, atol=1e-9), label


def test_total_differences_go_through_the_table():
    for row, axes in zip(table_2(PLAIN), draw(TOTAL).axes, strict=True):
        lines = named(axes)
        for skew, name in (("none", "identity"), ("sqrt", "tail, sqrt"), ("beta", "tail, beta")):
            x, y = lines[name]
            assert x[0] == 1.5 and x[-1] == 8
            for times, computed in zip((2, 4), row.sums[skew].tolist(), strict=True):
                assert y[np.abs(x - times).argmin()] == pytest.approx(computed)
            times, published = lines[f"{name}, published"]
            assert list(times) == [2, 4] and list(published) == pytest.approx(row.published[skew])


def test_figures_are_labelled_and_colour_blind_safe():
    for name in FIGURES:
        figure = draw(name)
        shared = figure.get_supylabel() if name == AT_END else ""
        for axes in figure.axes:
            below = axes.get_xlabel() or figure.axes[-1].get_xlabel()
            beside = axes.get_ylabel() or shared or figure.axes[0].get_ylabel()
            assert re.search(r"token|length", below) and beside and axes.get_title(), name
            for line in axes.lines:
                if not line.get_label().startswith("_"):
                    assert {line.get_color(), line.get_markeredgecolor()} & set(PALETTE), line.get_label()
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        assert len(legends) == 1, name


class Numbers(pickle.Pickler):
    """Writes tensors by their values."""

    def reducer_override(self, value):
        return (torch.tensor, (value.tolist(),)) if isinstance(value, torch.Tensor) else NotImplemented


def test_every_option_acts_where_it_is_said_to():
    def numbers(value: object) -> bytes:
        Numbers(written := io.BytesIO()).dump(value)
        return written.getvalue()

    def state(*words: object) -> dict[str, bytes]:
        setting = from_attributes(
            WarpSetting, build_parser("sensitivity").parse_args(["sensitivity", *map(str, words)])
        )
        found = {name: numbers(compute(setting)) for name, (compute, _) in FIGURES.items() if name != TOTAL}
        return {**found, "table": numbers([one.sums for one in table_2(setting)])}

    base, of_rope = state(), {"figure-2-raw-attention", "figure-A-interpolation", ATTENTION, OVER, AT_END, "table"}
    for words, acts in (
        (("--train-length", 40), {OVER, AT_END, WARPS}),
        (("--head-width", 96), of_rope),
        (("--base", 5e5), of_rope),
        (("--no-exponential",), {OVER, AT_END, "table"}),
    ):
        other = state(*words)
        assert {name for name in base if other[name] != base[name]} == acts, words


def test_the_smallest_inputs_are_drawn(only, tmp_path, monkeypatch):
    def render(figure, *paths):
        figure.draw_without_rendering()
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    only(*OURS)
    monkeypatch.setattr(style, "save", render)
    run_here("sensitivity", "--out", tmp_path / "deep/er", "--train-length", 2, "--head-width", 2, "--base", 1.01)
    assert listed(tmp_path / "deep/er") == names(*OURS)


def test_long_texts_are_thinned_and_cut_to_what_can_be_seen():
    """And wide heads are computed in parts."""
    for line in draw(OVER, WarpSetting(9000)).axes[0].lines:
        assert len(line.get_xdata()) == len(np.unique(line.get_xdata())) <= 4096
    assert all(len(line.get_xdata()) == 257 for axes in draw(AT_END, WarpSetting(9000)).axes for line in axes.lines)
    n = torch.arange(3000, dtype=torch.float64).reshape(3, 1000)
    assert torch.equal(WarpSetting(width=4096).raw(n), rope_raw(n, 4096))


def test_bad_numbers_are_one_line_and_leave_nothing(tmp_path, capsys):
    for flag, values, said in (
        ("--head-width", (7, 1, 4098), "choose an even number from 2 to 4096"),
        ("--train-length", (1, 65_537), "choose 2 to 65536"),
        ("--base", (1, 1e300), "choose a number from 1.01"),
    ):
        for value in values:
            error = error_of(capsys, "sensitivity", "--out", tmp_path / "out", flag, value)
            assert f"{flag} {value}: {said}" in error and list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_figure_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "used/total-difference.pdf").mkdir(parents=True)
    said = error_of(capsys, "sensitivity", "--out", tmp_path / "used")
    assert "total-difference.pdf is a folder" in said and listed(tmp_path / "used") == ["total-difference.pdf"]


def test_positions_and_several_differences_at_once():
    assert warp_positions("none", 4).tolist() == interpolate_positions(4, 4).tolist() == [0, 1, 2, 3, 4]
    assert interpolate_positions(4, 8).tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert warp_positions("sqrt", 20)[[1, 10, 19]].tolist() == pytest.approx([4.472136, 14.142136, 19.493589], abs=1e-6)
    assert warp_positions("beta", 20)[[1, 10, 19]].tolist() == pytest.approx([0.655477, 17.8125, 19.999964], abs=1e-6)
    tests = [20, 33, 80]
    for skew in ("none", "sqrt", "beta"):
        one_by_one = [total_difference(skew, 20, n, 10) for n in tests]
        assert total_differences(skew, 20, tests, 10).tolist() == pytest.approx(one_by_one, rel=1e-12, abs=1e-15)
