"""The dot plot of perplexities of many methods: order of rows, colours by family, values beyond the axis, intervals."""

from __future__ import annotations

import math

import pytest
from matplotlib.colors import to_rgb

from fairseq_rpe import encodings
from fairseq_rpe.core.looks import COLOURS
from fairseq_rpe.encodings.base import FAMILIES
from fairseq_rpe.figures import dot_plot, sweep_curves
from fairseq_rpe.figures.dot_plot import FAMILY_LOOKS, DotRow, encoding_family, select_extremes
from fairseq_rpe.figures.heat_maps import MAX_LINES
from fairseq_rpe.reports.chapters import perplexity_figures
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.sweeps.sweep_record import Method

NAMES = ("rope", "alibi", "fire", "shaw", "nope", "type1", "type2", "xpos", "inv_n", "cope", "music", "tisa", "complex")
# ratios of the perplexity at 1152 tokens to that at 64 tokens
RATIOS = dict(zip(NAMES, (1.3, 0.96, 0.97, 1.06, 1.14, 0.975, 0.98, 1.09, 1.07, 1.25, 1.24, 1.22, 21.5), strict=True))


def rows(ratios=RATIOS, base=50.0):
    return [
        DotRow(name, encoding_family(name), {64: base, 1152: base * ratio}, [ratio], (ratio - 0.01, ratio + 0.01))
        for name, ratio in ratios.items()
    ]


def labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def points(axes, label):
    """x and y of the points that a panel has under a label."""
    return [(x, round(y)) for line in axes.lines if line.get_label() == label for x, y in line.get_xydata()]


def numbers(axes):
    return {round(text.xy[1]): text.get_text() for text in axes.texts}


def test_rows_are_sorted_by_the_ratio_and_coloured_by_the_family():
    figure = dot_plot.draw_perplexity_dots(rows(), 64)
    left, right = figure.axes
    order = sorted(RATIOS, key=RATIOS.__getitem__)
    assert labels(left) == order and left.get_ylim() == right.get_ylim() == (len(order) - 0.5, -0.5)
    for y, name in enumerate(order[:-1]):
        assert points(left, name) == [(RATIOS[name], y)]
        [dot] = [line for line in left.lines if line.get_label() == name]
        look = FAMILY_LOOKS[encodings.registry.get(name).family]
        assert (to_rgb(dot.get_color()), dot.get_marker()) == (to_rgb(COLOURS[look.colour]), look.marker)
    assert numbers(left)[0] == "0.960" and numbers(right)[0] == "48.0"
    assert numbers(left)[-1] == "ratio" and numbers(right)[-1] == "at 1152"
    bars = [line.get_xdata() for line in left.lines if line.get_label() == "_interval"]
    assert [list(bar) for bar in bars] == [
        pytest.approx([RATIOS[name] - 0.01, RATIOS[name] + 0.01]) for name in order[:-1]
    ]
    assert "95 %" in left.get_title() and left.get_xlabel() == "perplexity at 1152 / at 64 tokens"
    present = [family for family in FAMILIES if any(row.family == family for row in rows())]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*present, "beyond the axis"]


def test_a_value_beyond_the_axis_is_an_arrow_with_its_number():
    left, right = dot_plot.draw_perplexity_dots(rows(), 64).axes
    last = len(RATIOS) - 1
    assert labels(left)[last] == "complex" and not points(left, "complex")
    for axes, number in ((left, "21.5"), (right, "1075")):
        assert axes.get_xscale() == "linear" and points(axes, "_beyond") == [(1.0, last)]
        assert numbers(axes)[last] == number
    # all other ratios spread over the axis
    low, high = left.get_xlim()
    assert low < 0.96 and 1.3 < high < 1.4
    # the perplexity at the training length is on the axis
    assert (50.0, last) in points(right, "_64") and (50.0 * 21.5, last) not in points(right, "_1152")


def test_with_many_large_values_the_axis_is_logarithmic_and_shows_all():
    ratios = {name: 1.6**k for k, name in enumerate(NAMES)}
    left, right = dot_plot.draw_perplexity_dots(rows(ratios), 64).axes
    for axes in (left, right):
        assert axes.get_xscale() == "log" and not points(axes, "_beyond")
    assert all(points(left, name) == [(ratio, y)] for y, (name, ratio) in enumerate(ratios.items()))
    diverged = [row._replace(perplexities={64: 50.0, 1152: math.inf}, ratios=[math.inf]) for row in rows()[:1]]
    left, _ = dot_plot.draw_perplexity_dots([*rows()[1:], *diverged], 64).axes
    assert labels(left)[-1] == "rope" and numbers(left)[len(NAMES) - 1] == "inf"


def test_lengths_are_hollow_small_and_filled_points_and_missing_ones_have_a_dash():
    table = [row._replace(perplexities={**row.perplexities, 256: 51.0}) for row in rows() if row.label != "complex"]
    short = DotRow("learned", encoding_family("learned"), {64: 49.0})
    figure = dot_plot.draw_perplexity_dots([short, *table], 64, "books")
    left, right = figure.axes
    assert labels(left)[-1] == "learned" and numbers(left)[12] == numbers(right)[12] == "–"
    assert right.get_xlabel() == "perplexity per token, books"
    assert right.get_title() == "hollow: 64 tokens,\nsmall: 256, filled: 1152"
    faces = {line.get_label(): (line.get_markerfacecolor(), line.get_markersize()) for line in right.lines}
    assert faces["_64"][0] == "white" != faces["_1152"][0] and faces["_256"][1] < faces["_1152"][1]
    assert "beyond the axis" not in [text.get_text() for text in figure.legends[0].get_texts()]


def test_seeds_are_small_points_around_their_mean():
    curves = {name: {64: [50.0, 52.0], 1152: [50.0 * ratio, 52.0 * ratio + 2]} for name, ratio in RATIOS.items()}
    ratios = {
        name: {n: [v / w for v, w in zip(own, c[64], strict=True)] for n, own in c.items()}
        for name, c in curves.items()
    }
    left, right = sweep_curves.draw_perplexity(curves, ratios, 64).axes
    assert left.get_title() == "mean of 2 seeds; small points: each seed"
    [(mean, y)] = points(left, "alibi")
    seeds = [x for x, row in points(left, "_seeds") if row == y]
    assert sorted(seeds) == sorted(ratios["alibi"][1152]) and mean == pytest.approx(sum(seeds) / 2)
    assert (51.0, y) in points(right, "_64")


def test_without_ratios_rows_are_sorted_by_the_perplexity():
    curves = {name: {64: [50.0 + k], 128: [50.0 + k]} for k, name in enumerate(reversed(NAMES))}
    [axes] = sweep_curves.draw_perplexity(curves, {name: {} for name in curves}, 32).axes
    assert labels(axes) == list(reversed(NAMES))
    one_length = {name: {64: points[64]} for name, points in curves.items()}
    [axes] = sweep_curves.draw_perplexity(one_length, {name: {64: [1.0]} for name in curves}, 64).axes
    assert axes.get_title() == "hollow: 64 tokens"


def test_every_family_has_a_look_and_patterns_of_layers_have_a_family():
    assert [family for family in FAMILY_LOOKS if family in FAMILIES] == list(FAMILIES)
    assert len(set(FAMILY_LOOKS.values())) == len(FAMILY_LOOKS)
    # these colours are those of position transforms
    assert not {look.colour for look in FAMILY_LOOKS.values()} & {"violet", "brown", "grey"}
    assert encoding_family("rope:base=500000|xpos") == encoding_family("rope")
    assert encoding_family("3*rope|nope") == dot_plot.SEVERAL_FAMILIES
    assert encoding_family("a model of another program") == dot_plot.OTHER_FAMILY


def test_lines_are_the_extremes_of_each_family():
    families = {name: encoding_family(name) for name in RATIOS}
    chosen = select_extremes(RATIOS, families)
    expected = {"alibi", "tisa", "fire", "shaw", "cope", "xpos", "rope", "complex", "nope"}
    assert set(chosen) == expected and [RATIOS[name] for name in chosen] == sorted(RATIOS[name] for name in expected)
    # seven families of two, one of them with a third method: the lowest of all and the highest of the larger ones
    ratios = {f"{k}{end}": k + step for k in range(7) for end, step in (("low", 0.0), ("high", 0.5))} | {"6most": 7.0}
    chosen = select_extremes(ratios, {name: name[0] for name in ratios})
    assert len(chosen) == MAX_LINES and {f"{k}low" for k in range(7)} <= set(chosen) and "6most" in chosen


def test_a_chapter_draws_the_dots_with_the_families_of_the_methods(monkeypatch):
    """Methods of a sweep have names that are no specs."""
    methods = {f"method-{name}": Method(f"method-{name}", name) for name in NAMES}
    results = Perplexities([], 64)
    curves = {name: {64: [50.0], 1152: [50.0 * RATIOS[method.rpe]]} for name, method in methods.items()}
    monkeypatch.setattr(Perplexities, "encodings", list(methods))
    monkeypatch.setattr(Perplexities, "lengths", [64, 1152])
    monkeypatch.setattr(Perplexities, "values_by_length", lambda self, name: curves[name])
    monkeypatch.setattr(
        Perplexities,
        "ratios_by_length",
        lambda self, name: {n: [v / 50.0 for v in own] for n, own in curves[name].items()},
    )
    monkeypatch.setattr(Perplexities, "final_ratio", lambda self, name: RATIOS[methods[name].rpe])
    figure = perplexity_figures.draw_perplexity(methods, results)
    assert labels(figure.axes[0])[0] == "method-alibi"
    assert encoding_family("alibi") in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "arrow" in perplexity_figures.perplexity_caption(results, figure)
    lines = perplexity_figures.draw_extremes(methods, results)
    assert lines is not None and "method-nope" in {line.get_label() for line in lines.axes[0].lines}
    [picture] = perplexity_figures.extremes(methods, results)
    assert "lowest and the highest ratio of each family" in picture.caption
    few = dict(list(methods.items())[:MAX_LINES])
    monkeypatch.setattr(Perplexities, "encodings", list(few))
    assert perplexity_figures.draw_extremes(few, results) is None
