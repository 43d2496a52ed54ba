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
from matplotlib.figure import Figure

from fairseq_rpe.analysis import rope_raw, sensitivity, total_difference
from fairseq_rpe.analysis.index_warping import Setting, table, trend, wave
from fairseq_rpe.analysis.sensitivity import interpolated, total_differences, warped
from fairseq_rpe.cli.main import build_parser
from fairseq_rpe.core import UserError
from fairseq_rpe.core.records import filled
from fairseq_rpe.figures import warping
from fairseq_rpe.figures.style import PALETTE

FIGURES = warping.FIGURES
ATTENTION = "figure-1-attention-over-distance"
PAPERS = ["figure-2-raw-attention", "figure-4-beta-cdf", "figure-A-interpolation", "figure-B-square-root"]
OVER, AT_END, WARPS, TOTAL = OURS = (
    *("sensitivity-over-position", "sensitivity-at-the-end"),
    *("warped-positions", "total-difference"),
)


def setting_of(*words: object) -> Setting:
    return filled(Setting, build_parser("sensitivity").parse_args(["sensitivity", *map(str, words)]))


def names(*figures: str) -> list[str]:
    return sorted([*(f"{name}.{ending}" for name in figures for ending in ("png", "pdf")), "sensitivity.csv"])


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def only(monkeypatch) -> Callable[..., None]:
    """Has the command draw these figures alone."""
    return lambda *kept: monkeypatch.setattr(warping, "FIGURES", {name: FIGURES[name] for name in kept})


def draw(name: str, setting: Setting):
    compute, drawn = FIGURES[name]
    return drawn(setting, compute(setting))


def curves(figure) -> list[list[tuple[str, np.ndarray, np.ndarray]]]:
    """(label, x, y) of every line of every panel."""
    return [[(line.get_label(), *line.get_data()) for line in axes.lines] for axes in figure.axes]


def named(panel) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {label: (np.asarray(x), np.asarray(y)) for label, x, y in panel if not label.startswith("_")}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """Everything, for a column and as LaTeX; what the command says is beside the folder."""
    folder = tmp_path_factory.mktemp("drawn") / "a folder"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        done = run_here("sensitivity", "--out", folder, "--train-length", 20, "--width", "column", "--latex")
    (folder.parent / "shown").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def plain() -> Setting:
    return Setting()


def test_files_table_and_what_is_said(drawn):
    assert listed(drawn) == sorted([*names(*FIGURES), "sensitivity.tex"])
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
    shown = (drawn.parent / "shown").read_text()
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
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
    assert f"{drawn / 'sensitivity.csv'}" in shown and f"{drawn / 'total-difference.png'}" in shown


def test_the_same_numbers_give_the_same_bytes(only, tmp_path):
    only(WARPS)

    def made() -> dict[str, bytes]:
        run_here("sensitivity", "--out", tmp_path / "out")
        return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}  # no temporary files

    assert (first := made()) == made() and sorted(first) == names(WARPS)


def test_the_trend_is_computed():
    def at(none, sqrt, beta):
        return {"none": none, "sqrt": sqrt, "beta": beta}

    assert trend(at((3, 3), (1, 2), (2, 1))) == (True, True)
    assert trend(at((3, 3), (1, 1), (2, 2))) == (True, False)
    assert trend(at((3, 3), (4, 2), (2, 1))) == (False, True)
    assert trend(at((3, 3), (1, 2), (2, 3))) == (False, False)
    found = table(Setting())
    assert [one.train_length for one in found] == [20, 500]
    for one in found:
        assert trend(one.published) == (True, True)


def test_a_trend_that_fails_is_said(only, tmp_path):
    only(WARPS)
    shown = run_here("sensitivity", "--out", tmp_path, "--head-width", 4, "--base", 10, "--train-length", 20).stdout
    assert "length 20 (c = 10): both skews lower the sum: no; beta best at 4x: yes" in shown
    assert "RoPE, base 10, heads 4 wide, differences of exp(raw attention)" in shown


# the paper's figures


def test_figure_2_is_attention_in_500_and_in_1000_tokens(plain):
    figure = draw("figure-2-raw-attention", plain)
    assert [axes.get_title() for axes in figure.axes] == ["500 tokens", "1000 tokens"]
    short, long = map(named, curves(figure))
    for length, lines in ((500, short), (1000, long)):
        n = torch.arange(length + 1)
        assert all(list(x) == n.tolist() for x, _ in lines.values())
        assert np.allclose(lines["RoPE"][1], rope_raw(n).exp()) and lines["RoPE"][1].min() > math.exp(-1)
        for head in (1, 4, 8):
            assert np.allclose(lines[f"ALiBi, head {head} of 8"][1], np.exp(1 - n.numpy() / 2.0**head))
    (more,) = long.keys() - short.keys()
    assert more == "RoPE, 1000 tokens interpolated to 500"
    assert np.allclose(long[more][1][::2], short["RoPE"][1])


def test_the_grey_zone_of_figure_2_is_what_training_has_not_seen(plain):
    short, long = draw("figure-2-raw-attention", plain).axes
    [zone] = [patch for patch in long.patches if "not seen in training" in patch.get_label()]
    assert (zone.get_x(), zone.get_x() + zone.get_width()) == (500, 1000)
    red, green, blue, _ = zone.get_facecolor()
    assert red == green == blue and not short.patches


def test_figure_a_has_two_lines_for_each_longer_text(plain):
    figure = draw("figure-A-interpolation", plain)
    found = list(map(named, curves(figure)))
    assert [list(lines) for lines in found] == [["100 tokens", "interpolated to 100 tokens"]] * 2
    for (length, step), lines, axes in zip(((200, 2), (500, 5)), found, figure.axes, strict=True):
        (x, own), (far, squeezed) = lines.values()
        assert (len(x) - 1, len(far) - 1) == (100, length) and axes.get_title().startswith(f"{length} tokens")
        assert np.allclose(own, rope_raw(torch.arange(101)).exp()) and np.allclose(squeezed[::step], own)
        assert np.allclose(squeezed, rope_raw(torch.arange(length + 1) / step).exp(), atol=1e-6)
    narrow = named(curves(draw("figure-A-interpolation", Setting(width=64)))[0])
    assert np.allclose(narrow["100 tokens"][1], rope_raw(torch.arange(101), 64).exp())


def test_figures_4_and_b_are_the_skews(plain):
    beta, root = (named(curves(draw(name, plain))[0]) for name in ("figure-4-beta-cdf", "figure-B-square-root"))
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


# further views


def test_rope_stays_above_and_alibi_vanishes(plain):
    figure = draw(ATTENTION, plain)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and "tokens" in axes.get_xlabel()
    assert [line for line in axes.lines if list(line.get_ydata()) == [math.exp(-1)] * 2]
    lines = named(curves(figure)[0])
    assert len(lines) == 7
    for label, (x, y) in lines.items():
        assert x[0] == 1 and x[-1] == 1e5
        assert (y.min() > math.exp(-1)) if label.startswith("RoPE") else (y[-1] < 1e-150 and y[0] > 1.5), label
    assert np.allclose(lines["RoPE, head width 64"][1], rope_raw(torch.tensor(lines["RoPE, wide head"][0]), 64).exp())
    assert "RoPE, head width 96" in named(curves(draw(ATTENTION, Setting(width=96)))[0])


def test_interpolation_lowers_and_stretches_the_waves(plain):
    whole, tail = curves(draw(OVER, plain))
    training, twice, four = named(tail).values()
    for times, (x, y) in zip((1, 2, 4), (training, twice, four), strict=True):
        assert x[0] == 47 and x[-1] == 0
        expected = sensitivity(interpolated(512, times * 512), exponential=True)[-48:]
        assert np.allclose(y, expected, atol=1e-15)
    assert 1.8 < training[1].max() / twice[1].max() < 2.2 and 1.8 < twice[1].max() / four[1].max() < 2.2
    ends = [y[-1] for _, y in named(whole).values()]
    assert ends[0] / ends[1] == pytest.approx(2, rel=0.02) and ends[1] / ends[2] == pytest.approx(2, rel=0.02)
    for times in (1, 2, 4):
        weights = wave(times)
        assert weights.sum() == pytest.approx(1) and 0 <= weights[0] <= weights[1]
        turned = (torch.arange(len(weights), dtype=torch.float64) / times).cos() @ weights
        assert abs(turned) < 0.01  # a wave is averaged away
    assert all(x[-1] <= 512 for _, x, _ in whole)


@pytest.mark.parametrize("length", [20, 500])
def test_the_end_holds_the_terms_of_table_2(length):
    figure = draw(AT_END, Setting(length))
    reach = {20: 10, 500: 200}[length]
    (row,) = (one for one in table(Setting()) if one.train_length == length)
    assert len(figure.axes) == 3
    for sums, axes, panel in zip(row.sums.values(), figure.axes, curves(figure), strict=True):
        training, *tests = named(panel).values()
        assert list(training[0]) == list(range(reach, -1, -1))
        assert axes.get_xlim()[0] > reach and axes.get_xlim()[1] < 0  # the last token is at the right
        for times, computed, (_, y) in zip((2, 4), sums.tolist(), tests, strict=True):
            total = np.abs(training[1] - y).sum()
            assert total == pytest.approx(computed)
            assert f"{total:.3g} at {times}×" in axes.get_title()
    sqrt = named(curves(figure)[1])
    (_, training), (_, twice), (_, four) = sqrt.values()
    assert abs(training[-1] - twice[-1]) < 0.1 * abs(training[-1] - four[-1])  # the slope of sqrt at its end is 1/2


def test_warps_are_what_training_does(plain):
    from fairseq_rpe.positions import build

    (panel,) = curves(draw(WARPS, plain))
    lines = named(panel)
    index = torch.arange(512, dtype=torch.float64)[None]
    generator = torch.Generator().manual_seed(0)
    specs = {"identity": "identity", "tail, sqrt": "warp:head=0,tail=1,skew=sqrt", "tail, beta": "warp:head=0,tail=1"}
    specs |= {f"head, α = 1/{n}": f"warp:head=1,tail=0,alpha=1/{n}" for n in (2, 4, 6, 8)}
    assert lines.keys() == specs.keys()
    for label, spec in specs.items():
        moved = build(spec, 512)(index, torch.tensor([512]), generator).k[0]
        assert np.allclose(lines[label][1][:-1], moved, atol=1e-9), label


def test_total_differences_go_through_the_table(plain):
    figure = draw(TOTAL, plain)
    for row, panel in zip(table(plain), curves(figure), strict=True):
        lines = named(panel)
        for skew, name in (("none", "identity"), ("sqrt", "tail, sqrt"), ("beta", "tail, beta")):
            x, y = lines[name]
            assert x[0] == 1.5 and x[-1] == 8
            for times, computed in zip((2, 4), row.sums[skew].tolist(), strict=True):
                at = np.abs(x - times).argmin()
                assert y[at] == pytest.approx(computed)
            points = lines[f"{name}, published"]
            assert list(points[0]) == [2, 4]
            assert list(points[1]) == pytest.approx(row.published[skew])


def test_figures_are_labelled_and_colour_blind_safe(plain):
    for name in FIGURES:
        figure = draw(name, plain)
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
        setting = setting_of(*words)
        found = {name: numbers(compute(setting)) for name, (compute, _) in FIGURES.items() if name != TOTAL}
        return {**found, "table": numbers([one.sums for one in table(setting)])}

    base, of_rope = state(), {"figure-2-raw-attention", "figure-A-interpolation", ATTENTION, OVER, AT_END, "table"}
    for words, acts in (
        (("--train-length", 40), {OVER, AT_END, WARPS}),
        (("--head-width", 96), of_rope),
        (("--base", 5e5), of_rope),
        (("--no-exponential",), {OVER, AT_END, "table"}),
    ):
        other = state(*words)
        assert {name for name in base if other[name] != base[name]} == acts, words


def test_the_smallest_inputs_are_drawn(only, tmp_path):
    only(*OURS)
    smallest = ("--train-length", 2, "--head-width", 2, "--base", 1.01)
    run_here("sensitivity", "--out", tmp_path / "deep/er", *smallest)
    assert listed(tmp_path / "deep/er") == names(*OURS)


def test_long_texts_are_thinned_and_cut_to_what_can_be_seen():
    setting = Setting(9000)
    whole, _ = curves(draw(OVER, setting))
    assert all(len(x) <= 4096 and len(np.unique(x)) == len(x) for _, x, _ in whole)
    for panel in curves(draw(AT_END, setting)):
        assert all(len(x) == 257 for _, x, _ in panel)


def test_wide_heads_are_computed_in_parts():
    n = torch.arange(3000, dtype=torch.float64).reshape(3, 1000)
    assert torch.equal(Setting(width=4096).raw(n), rope_raw(n, 4096))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--head-width", 7), "--head-width 7: choose an even number from 2 to 4096"),
        (("--head-width", 1), "--head-width 1: choose an even number"),
        (("--head-width", 4098), "--head-width 4098: choose an even number"),
        (("--train-length", 1), "--train-length 1: choose 2 to 65536"),
        (("--train-length", 65_537), "--train-length 65537: choose 2 to 65536"),
        (("--base", 1), "--base 1: choose a number from 1.01"),
        (("--base", 1e300), "--base 1e+300: choose"),
    ],
)
def test_bad_numbers_are_one_line_and_leave_nothing(words, said, tmp_path, capsys):
    assert said in error_of(capsys, "sensitivity", "--out", tmp_path / "out", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_figure_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "used/total-difference.pdf").mkdir(parents=True)
    said = error_of(capsys, "sensitivity", "--out", tmp_path / "used")
    assert "total-difference.pdf is a folder" in said and listed(tmp_path / "used") == ["total-difference.pdf"]


def test_a_failing_figure_leaves_the_old_one(only, tmp_path, monkeypatch, capsys):
    def fail(figure, stream, **how):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    only(WARPS)
    (tmp_path / f"{WARPS}.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fail)
    assert "no space left" in run_here("sensitivity", "--out", tmp_path, "--train-length", 20, ok=False).stderr
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {f"{WARPS}.png": b"old"}


def test_positions_and_several_differences_at_once():
    assert warped("none", 4).tolist() == interpolated(4, 4).tolist() == [0, 1, 2, 3, 4]
    assert interpolated(4, 8).tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert warped("sqrt", 20)[[1, 10, 19]].tolist() == pytest.approx([4.472136, 14.142136, 19.493589], abs=1e-6)
    assert warped("beta", 20)[[1, 10, 19]].tolist() == pytest.approx([0.655477, 17.8125, 19.999964], abs=1e-6)
    tests = [20, 33, 80]
    for skew in ("none", "sqrt", "beta"):
        one_by_one = [total_difference(skew, 20, n, 10) for n in tests]
        assert total_differences(skew, 20, tests, 10).tolist() == pytest.approx(one_by_one, rel=1e-12, abs=1e-15)
    with pytest.raises(UserError, match="test length of 19 is shorter"):
        total_differences("none", 20, [20, 19], 10)
