"""Figures for a paper: fonts, widths, ticks, heat maps of many methods, what a picture explains by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from conftest import error_of, run_here
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from specs import SPECS

from fairseq_rpe.analysis.bias_snapshots import bias_map
from fairseq_rpe.analysis.empirical_receptive_field import quantised_curve
from fairseq_rpe.analysis.speed import Timing
from fairseq_rpe.cli.main import COMMANDS, build_parser
from fairseq_rpe.encodings import build
from fairseq_rpe.figures import (
    WIDTHS,
    biases,
    heat_maps,
    receptive_fields,
    score_curves,
    style,
    sweep_curves,
    timing,
    warping,
)
from fairseq_rpe.figures.heat_maps import MAX_LINES

LENGTHS = (64, 128, 256)
FEW, MANY = ([f"method{k}" for k in range(count)] for count in (MAX_LINES, MAX_LINES + 1))


def curves(names) -> dict[str, dict[int, list[float]]]:
    return {name: {n: [50.0 + k + i, 52.0 + k + i] for i, n in enumerate(LENGTHS)} for k, name in enumerate(names)}


def masses(names) -> list[receptive_fields.AttentionMass]:
    def weights(k: int) -> torch.Tensor:
        slopes = torch.tensor([[0.1], [0.4]], dtype=torch.float64) * (k + 1)
        return (-slopes * torch.arange(32)).softmax(-1)[None]

    return [
        receptive_fields.AttentionMass(name, 16, weights(k), weights(k), series=weights(2 * k))
        for k, name in enumerate(names)
    ]


def comparisons(names: Iterable[str]) -> dict[str, Callable[[], Figure]]:
    """What draws each figure that compares methods."""
    names = list(names)
    number, ppl = {name: k for k, name in enumerate(names)}, curves(names)
    ratios = {name: {n: [v / points[64][0] for v in own] for n, own in points.items()} for name, points in ppl.items()}
    sets = {s: {name: [50.0 + k] for name, k in number.items()} for s in ("boolq", "cb", "rte", "wic", "mean")}
    epsilons, delta = torch.tensor([0.5, 0.1, 0.01]), torch.tensor([[9.0, 4.0, 1.0]] * 2)
    losses = [(name, {5: 9.0 - k / 9, 10: 8.0 - k / 9}) for name, k in number.items()]
    profiles = {name: -0.01 * (k + 1) * torch.arange(99.0) for name, k in number.items()}
    fields_of = {name: [(epsilons, (k + 2) / epsilons)] for name, k in number.items()}
    windows = [timing.WindowTiming(name, "plain", w, w + 9.0, w) for name in names for w in (8, 16)]
    models = [Timing(name, "auto", "inference", 16, 3.0, 1, 2, 4) for name in names]
    return {
        "perplexity": lambda: sweep_curves.draw_perplexity(ppl, ratios, 64),
        "exact match": lambda: sweep_curves.draw_exact_match({"copy": ppl}, {"copy": (2, 64)}),
        "training": lambda: sweep_curves.draw_training_loss(losses),
        "positions": lambda: sweep_curves.draw_loss_by_position(
            {name: {0: 9.0, 3: 7.0 - k / 9} for name, k in number.items()}
        ),
        "scores": lambda: score_curves.draw_scores_over_length({("set", "F1"): ppl}, 64, {}),
        "sets": lambda: score_curves.draw_scores_by_set(sets, "accuracy"),
        "profiles": lambda: biases.draw_weight_comparison(profiles, 1),
        "trf": lambda: receptive_fields.draw_theoretical(fields_of),
        "erf": lambda: receptive_fields.draw_empirical(masses(names), [0.5, 0.1]),
        "quantised erf": lambda: receptive_fields.draw_empirical_quantised(masses(names)),
        "erf beside trf": lambda: receptive_fields.draw_empirical_and_theoretical(masses(names)),
        "delta": lambda: receptive_fields.draw_truncation_errors(
            [receptive_fields.TruncationErrors(name, 16, 32, [1, 2, 4], delta, 2 * delta) for name in names]
        ),
        "windows": lambda: timing.draw_window_timing(windows, 1, 4, [8]),
        "models": lambda: timing.draw_model_timing(models, "machine"),
    }


def lines_of(figure: Figure, names) -> set[str]:
    return {line.get_label() for axes in figure.axes for line in axes.lines} & set(names)


def rows_of(figure: Figure) -> list[str]:
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes if axes.images]
    return next(names for names in rows if any(names))


def test_pdfs_embed_truetype_fonts_of_every_letter(tmp_path):
    figure, (axes,) = style.panels(1, 1, (3, 3))
    axes.set(xlabel="ε, δ, Σ and $e^{-1}$", ylabel="plain")
    style.save(figure, tmp_path / "a.pdf", tmp_path / "b.pdf")
    written = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in written and b"/Type3" not in written
    assert written == (tmp_path / "b.pdf").read_bytes()


def test_ticks_have_no_offset():
    near = {"alibi": {0: 100_000.001, 9: 100_000.003}}
    figure = sweep_curves.draw_loss_by_position(near)
    figure.draw_without_rendering()
    [axes] = figure.axes
    assert axes.yaxis.get_offset_text().get_text() == ""
    assert all(float(label.get_text()) > 99_999 for label in axes.get_yticklabels())


def letters(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def test_an_encoding_looks_the_same_in_every_figure_and_print_is_legible():
    names = ("alibi", "type1", "type2", "fire")
    looks, seen = style.assign_looks(list(SPECS)), set()
    made = {name: build(name, 4, 64) for name in names}
    profiles = {name: encoding.bias_profile(64) for name, encoding in made.items()}
    named = {what: draw() for what, draw in comparisons(names).items()}
    assert not any(axes.images for figure in named.values() for axes in figure.axes)  # lines of up to twelve methods
    named["mean"] = sweep_curves.draw_mean_perplexity(
        {name: [50.0 + k, 51.0] for k, name in enumerate(names)}, [64, 128]
    )
    named |= {
        "of distance": biases.draw_profiles(profiles),
        "heads": biases.draw_head_profiles(profiles["alibi"], "alibi"),
    }
    named["queries"] = biases.draw_query_biases({i: torch.randn(2, 3, i + 1) for i in (4, 9)}, "fire")
    named["maps"] = biases.draw_bias_maps({name: bias_map(own, 9, [1])[0][0] for name, own in made.items()}, 1, 2)
    for what, figure in named.items():
        assert figure.get_figwidth() <= style.PAGE and min(text.get_fontsize() for text in letters(figure)) >= 7
        for line in (line for axes in figure.axes for line in axes.lines if line.get_label() in names):
            look = looks[line.get_label()]
            assert line.get_color() == look.colour and line.get_marker() in (look.marker, "None"), what
            assert line._unscaled_dash_pattern == Line2D([], [], linestyle=look.dashes)._unscaled_dash_pattern
            seen.add(line.get_label())
        # a caption belongs to the title: axis labels name a quantity and its unit
        for label in (f"{axes.get_xlabel()}\n{axes.get_ylabel()}" for axes in figure.axes):
            assert ";" not in label or what == "scores"  # which says there what its dashes are
            assert all(len(line) < 50 for line in label.split("\n")), what
        for legend in figure.legends:
            dashed = [line for line in legend.get_lines() if line.is_dashed()]
            # two dashes of the longest pattern, 8.5 line widths each
            assert all(legend.handlelength * 8.3 >= 2 * 8.5 * line.get_linewidth() for line in dashed)
    assert seen == set(names)


def test_the_cells_of_a_heat_map_are_the_means_and_the_lowest_loss_is_first():
    losses = {name: {n: 9.0 - k / 9 + n / 99 for n in (0, 1, 3)} for k, name in enumerate(MANY)}
    figure = sweep_curves.draw_loss_by_position(losses)
    axes = figure.axes[0]
    assert rows_of(figure) == list(reversed(MANY))
    cells = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axes.texts}
    for row, name in enumerate(rows_of(figure)):
        assert [cells[row, column] for column in range(3)] == [f"{loss:.2f}" for loss in losses[name].values()]
        assert axes.images[0].get_array()[row].tolist() == pytest.approx(list(losses[name].values()))


def test_what_is_not_known_is_grey_and_other_places_are_interpolated():
    _, (axes,) = heat_maps.map_panels(1, 1, 2)
    rows = {"a": {0: 0.0, 10: 10.0}, "b": {5: 1.0}}
    heat_maps.draw_map(axes, rows, heat_maps.colour_norm(rows), continuous=True)
    first, second = axes.images[0].get_array()
    assert first.tolist() == [0, 5, 10] and second.tolist() == [None, 1.0, None]
    shown = [heat_maps.format_short(v) for v in (47.51, 50.0, 1234.4, 91_000.0, 0.001)]
    assert shown == ["47.5", "50.0", "1234", "9.1e4", "0.001"]


def overflow(figure: Figure) -> float:
    """Inches by which anything leaves the figure."""
    figure.draw_without_rendering()
    box, (wide, high) = figure.get_tightbbox(), figure.get_size_inches()
    return max(-box.x0, -box.y0, box.x1 - wide, box.y1 - high)


def check_fits(figure: Figure, name: str, what: str) -> None:
    style.fit_texts(figure)  # as save does
    assert figure.get_figwidth() == WIDTHS[name], what
    assert overflow(figure) <= 0.1, what
    assert min(text.get_fontsize() for text in letters(figure)) >= 7, what


@pytest.mark.parametrize("name", WIDTHS)
def test_figures_fit_the_width_of_a_paper(name):
    """Lines with a legend, two panels with one legend, and bars; before a release all others."""
    with style.figures_at_width(name):
        made = comparisons(FEW[:4])
        for what in ("perplexity", "models") if name == "page" else ("training", "erf beside trf", "models"):
            check_fits(made[what](), name, what)
    figure, _ = style.panels(1, 1, (4.0, 3.0))
    assert figure.get_figwidth() == 4.0


@pytest.mark.release
def test_every_figure_fits_a_column():
    """A page has more room."""
    with style.figures_at_width("column"):
        named = {what: draw() for what, draw in comparisons(FEW[:4]).items()}
        setting = warping.WarpSetting(20)
        for stem in ("figure-2-raw-attention", "figure-A-interpolation", "sensitivity-at-the-end"):
            compute, draw = warping.FIGURES[stem]
            named[stem] = draw(setting, compute(setting))
        maps = {spec: bias_map(build(spec, 4, 64), 9, [1])[0][0] for spec in ("alibi", "type1", "t5_bias")}
        named["heat maps"] = biases.draw_bias_maps(maps, 1, 2)
        for what, figure in named.items():
            check_fits(figure, "column", what)


def test_more_than_twelve_methods_have_rows_that_fit():
    assert len(FEW) == 12 and len(lines_of(comparisons(FEW)["profiles"](), FEW)) == 12
    with style.figures_at_width("column"):
        for what, draw in comparisons(MANY).items():
            figure = draw()
            if what in ("perplexity", "delta", "models"):
                check_fits(figure, "column", what)
            if what == "models":  # bars with a row each
                continue
            if what == "perplexity":  # a dot plot
                shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
            else:
                assert not lines_of(figure, MANY) and not figure.legends, what
                shown = rows_of(figure)
            assert {row.partition(",")[0] for row in shown} == set(MANY) and len(shown) == len(MANY), what


def test_a_name_that_is_wider_than_its_panel_is_broken(tmp_path):
    with style.figures_at_width("column"):
        figure, (axes,) = style.panels(1, 1, (9, 3))
        axes.set_xlabel("a quantity with a name that no column of a paper has room for (tokens)")
        style.save(figure, tmp_path / "figure.png", dpi=20)
    assert "\n" in axes.get_xlabel() and overflow(figure) <= 0


def test_titles_of_long_specs_overlap_nothing():
    specs = [f"fire:exact=true,hidden={k}" for k in range(4)] + [f"t5_bias:max_distance={k}" for k in (99, 128, 256)]
    with style.figures_at_width("column"):
        others = [f"alibi{k}" for k in range(7)]
        figure = biases.draw_bias_maps({spec: torch.zeros(9, 9) for spec in [*specs, *others]}, 1, 1)
        style.fit_texts(figure)
        figure.draw_without_rendering()
    *panels, bar = [axes for axes in figure.axes if axes.get_visible()]
    boxes = [axes.title.get_window_extent() for axes in panels] + [bar.get_window_extent()]
    assert [axes.get_title().replace("\n", "") for axes in panels][:7] == specs
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_a_legend_has_as_many_columns_as_fit():
    with style.figures_at_width("column"):
        figure, (axes,) = style.panels(1, 1, (9, 3))
        for k in range(4):
            axes.plot([0, 1], [k, k], label=f"a method with a name of {k}")
        style.add_legend_of(figure, axes, 4)
        figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


def test_every_command_that_draws_takes_a_width():
    taken = set()
    for command in COMMANDS:
        [actions] = [action for action in build_parser(command)._actions if action.dest == "command"]
        options = actions.choices[command]._option_string_actions
        if "--width" in options and options["--width"].dest == "figure_width":
            taken.add(command)
    expected = {"figures", "report", "extend", "sliding", "erf", "trf", "sensitivity", "bench", "fire-fit"}
    assert taken == {*expected, "context-use", "needle-attention", "passkey", "position-profile"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trf", "alibi", "--width", "wide"], ["'wide' is not column or page"]),
        (["sensitivity", "--width", "64"], ["'64' is not column or page", "--head-width takes numbers"]),
        (["bench", "--width", "64"], ["--head-width takes numbers"]),
        (["fire-fit", "alibi", "--width", "64"], ["--model-width takes numbers"]),
        (["fire-fit", "alibi", "--width", "page"], ["--width", "--figure FILE"]),
        (["bench", "--width", "page"], ["--width", "--out"]),
        (["bench", "--latex"], ["--latex", "--out"]),
    ],
)
def test_a_width_that_is_none_is_refused(argv, words, capsys):
    said = error_of(capsys, *argv)
    assert all(word in said for word in words)


def test_the_tables_of_a_verdict_are_written_as_latex(tmp_path):
    file = tmp_path / "verdict.tex"
    assert str(file) in run_here("verdict", "alibi", "type1", "--heads", "2", "--latex", file).stdout
    text = file.read_text()
    assert text.count(r"\begin{tabular}") == 2 and r"\caption{alibi}" in text and "converges" in text


def test_a_command_draws_at_the_width(tmp_path, monkeypatch):
    """The width of a file that is written: test_sensitivity_cli.py."""
    saved = []
    monkeypatch.setattr(style, "save", lambda figure, *paths: saved.append((figure.get_figwidth(), len(paths))))
    run_here("trf", "alibi", "--heads", "1", "--out", tmp_path, "--width", "column")
    assert saved == [(WIDTHS["column"], 2)]


def test_the_picture_of_delta_says_what_delta_is():
    delta = torch.tensor([[9.0, 4.0, 1.0]])
    for count in (1, MAX_LINES + 1):
        found = [receptive_fields.TruncationErrors(f"m{k}", 16, 32, [1, 2, 4], delta, 2 * delta) for k in range(count)]
        said = " ".join(receptive_fields.draw_truncation_errors(found).get_suptitle().split())
        assert "δ(i, j) = ‖o_i − o_i^j‖" in said and "its j nearest keys" in said and "bound" in said
    none_left_out = receptive_fields.draw_truncation_errors(
        [receptive_fields.TruncationErrors("alibi", 1, 1, [1], torch.zeros(1, 1), torch.zeros(1, 1))]
    )
    assert none_left_out.axes[0].get_yscale() == "linear"


def test_erf_and_trf_are_a_curve_for_each_method_side_by_side():
    found = masses(["alibi", "type1"])
    plain = receptive_fields.AttentionMass("rope", 16, found[0].mass, None)
    left, right = receptive_fields.draw_empirical_and_theoretical([*found, plain]).axes
    assert (left.get_title(), right.get_title()) == ("empirical (ERF)", "theoretical (TRF)")
    for axes, names in ((left, ["alibi", "type1", "rope"]), (right, ["alibi", "type1"])):
        assert [line.get_label() for line in axes.lines] == names and axes.get_xlim() == (1, 0)
    for one, line in zip(found, right.lines, strict=True):
        epsilons, part = quantised_curve(one.series.mean((0, 1)))
        assert line.get_xdata().tolist() == epsilons.tolist() and line.get_ydata().tolist() == part.tolist()
    part = quantised_curve(found[1].mass.mean((0, 1)))[1]
    assert left.lines[1].get_ydata().tolist() == part.tolist() and not torch.equal(
        part, quantised_curve(found[1].series)[1]
    )
    assert [axes.get_title() for axes in receptive_fields.draw_empirical_and_theoretical([plain]).axes] == [
        "empirical (ERF)"
    ]


def test_the_mean_of_alibi_is_a_line_among_windows():
    rows = [
        timing.WindowTiming(name, mode, w, w + 9.0, w) for name in ("alibi", "rope") for mode in "ab" for w in (8, 16)
    ]
    figure = timing.draw_window_timing(rows, 1, 4, [8], [timing.WindowMean("alibi", 21.5, 8, 16)])
    left, right = figure.axes
    [line] = [line for line in left.lines if line.get_label() == "_mean"]
    assert list(line.get_ydata()) == [21.5, 21.5] and line.get_color() == style.assign_looks(["alibi"])["alibi"].colour
    assert not [line for line in right.lines if line.get_label() == "_mean"]
    assert "alibi, a: mean of windows 8 to 16" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_figures_keep_their_widths_without_one():
    assert (
        style.figure_width() == style.COLUMN and style.figure_width(2) == style.PAGE and style.panel_columns(9, 4) == 4
    )
    with style.figures_at_width("column"):
        assert (
            style.figure_width(2) == WIDTHS["column"]
            and style.panel_columns(9, 4) == 1
            and style.panel_columns(9, 4, 1.5) == 2
        )
    with pytest.raises(KeyError), style.figures_at_width("book"):
        pass
    assert style.figure_width() == style.COLUMN
