"""``figures``: what is drawn is what the encodings are, of specs and of a sweep's checkpoints; refusals."""

from __future__ import annotations

import json
from argparse import Namespace
from itertools import pairwise

import pytest
import torch
from conftest import error_of, p_of_heads, run_here, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from refusal import refused
from specs import CONTENT, REGION_ROPES, SPECS

from fairseq_rpe import encodings
from fairseq_rpe.analysis.bias_snapshots import bias_map
from fairseq_rpe.analysis.speed import BASELINE, Timing
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.alibi import Alibi
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.figures import biases as drawings
from fairseq_rpe.figures import score_curves, style, sweep_curves, timing
from fairseq_rpe.figures.heat_maps import MAX_LINES
from fairseq_rpe.figures.style import spread_labels
from fairseq_rpe.reports import figure_gallery
from fairseq_rpe.sweeps.sweep_record import Method


def panels(figure):
    return [axes for axes in figure.axes if axes.get_visible() and axes.get_title()]


def test_heat_maps_are_the_weights_of_the_bias_alone():
    maps = {name: bias_map(build(name, 4, 64), 9, [1])[0][0] for name in ("alibi", "sandwich", "kerple_log")}
    shown = panels(drawings.draw_bias_maps(maps, 1, 2))
    assert [axes.get_title() for axes in shown] == list(maps)
    for axes, bias in zip(shown, maps.values(), strict=True):
        image = axes.images[0].get_array()
        for query in range(9):
            row = bias[query, : query + 1]
            expected = (row - row.max()).exp().clamp_min(1e-4).tolist()
            assert image[query, : query + 1].tolist() == pytest.approx(expected)
            assert image.mask[query, query + 1 :].all() or torch.tensor(image[query, query + 1 :]).isnan().all()
    bias = bias_map(build("window:window=3", 1, 8), 6, [0])[0][0]
    [axes] = panels(drawings.draw_bias_maps({"window:window=3": bias}, 1, 1))  # without holes
    assert axes.images[0].get_array()[5].tolist() == pytest.approx([1e-4] * 3 + [1.0] * 3)
    with refused("nothing to draw"):
        drawings.draw_bias_maps({}, 1, 1)


def test_one_head_compared_is_a_line_for_each_encoding():
    values = {name: build(name, 4, 64).bias_profile(50)[2] for name in ("alibi", "type1", "type2")}
    [axes] = drawings.draw_weight_comparison(values, 3).axes
    for line in axes.lines:
        profile = values[line.get_label()]
        assert line.get_ydata().tolist() == pytest.approx((profile - profile.max()).exp().tolist())
    assert axes.get_xscale() == axes.get_yscale() == "log" and "tokens" in axes.get_xlabel()


def test_queries_and_training_show_the_given_numbers():
    biases, places = {i: torch.randn(2, 3, i + 1) for i in (4, 9)}, [(i, k) for i in (4, 9) for k in (0, 1)]
    for axes, (i, layer) in zip(panels(drawings.draw_query_biases(biases, "fire")), places, strict=True):
        assert axes.get_title() == f"query {i}, layer {layer}"
        for head, line in enumerate(axes.lines):
            assert line.get_ydata().tolist() == pytest.approx(biases[i][layer, head].tolist())
    many = drawings.draw_query_biases({i: torch.randn(6, 3, i + 1) for i in (4, 9)}, "fire")  # in rows of four
    assert [axes.get_title() for axes in panels(many)] == [f"query {i}, layer {k}" for i in (4, 9) for k in range(6)]
    assert many.get_figwidth() <= style.PAGE
    values = {"model, head 1": torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -3.0]])}
    [axes] = panels(drawings.draw_bias_over_training(values, [0, 1, 8], [0, 100], "kerple_log"))
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0, -1, -2], [0, -2, -5]]
    assert axes.lines[0].get_color() != axes.lines[1].get_color()


def lines(axes):
    """What each line of a legend is drawn from."""
    return {line.get_label(): dict(zip(*map(list, line.get_data()), strict=True)) for line in axes.lines}


def shares(curves, at):
    return {
        name: {n: [v / base for v, base in zip(own, points[at], strict=True)] for n, own in points.items()}
        for name, points in curves.items()
    }


def test_perplexity_is_the_mean_with_bars_over_the_seeds():
    curves = {"alibi": {64: [50.0, 52.0], 128: [40.0, 46.0]}, "rope": {64: [60.0], 128: [63.0]}}
    figure = sweep_curves.draw_perplexity(curves, shares(curves, 64), 64)
    [axes] = figure.axes
    drawn = lines(axes)
    assert drawn["alibi"] == {64: 51.0, 128: 43.0} and drawn["rope"] == {64: 60.0, 128: 63.0}
    assert drawn["_training"].keys() == {64}
    [bars] = axes.collections  # of alibi alone: rope has one seed
    spans = [sorted(point[1] for point in bar) for bar in bars.get_segments()]
    assert spans == [pytest.approx([50, 52]), pytest.approx([40, 46])]
    assert bars.get_colors()[0][:3].tolist() == pytest.approx(to_rgb(style.assign_looks(["alibi"])["alibi"].colour))
    assert axes.get_title() == "mean of 1 or 2 seeds; bars: least to largest"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "128"]
    assert axes.get_legend() is None and {text.get_text() for text in axes.texts} == {"alibi", "rope", "trained at 64"}


def test_mean_perplexity_is_sorted_with_a_line_over_the_seeds():
    values = {"rope": [60.0], "alibi": [50.0, 52.0], "type1": [49.0, 57.0]}
    [axes] = sweep_curves.draw_mean_perplexity(values, [64, 128, 256]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["alibi", "type1", "rope"]
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines if line.get_label() in values}
    assert points == {"alibi": [[51, 0]], "type1": [[53, 1]], "rope": [[60, 2]]}
    spans = [line.get_xdata().tolist() for line in axes.lines if line.get_label() not in values]
    assert spans == [[50, 52], [49, 57], [60, 60]]
    assert [text.get_text() for text in axes.texts] == ["51.00", "53.00", "60.00"]
    assert axes.get_title() == "3 lengths, 64 to 256 tokens\nmean of 1 or 2 seeds; bars: least to largest"
    assert axes.get_xscale() == "linear" and axes.get_ylim() == (2.5, -0.5)
    [wide] = sweep_curves.draw_mean_perplexity({"rope": [9000.0], "alibi": [50.0]}, [64, 128]).axes
    assert wide.get_xscale() == "log" and wide.get_title() == "2 lengths, 64 to 128 tokens"


EXPLODING = {
    "sinusoidal": {64: [53.0], 128: [400.0], 256: [9000.0]},
    "alibi": {64: [49.0], 128: [48.0], 256: [47.5]},
    "type1": {64: [50.0], 128: [49.0], 256: [49.2]},
    "kerple_log": {64: [49.5], 128: [49.7], 256: [50.2]},
}


def test_a_curve_that_squashes_the_rest_gives_a_second_panel_of_ratios():
    figure = sweep_curves.draw_perplexity(EXPLODING, shares(EXPLODING, 64), 64)
    above, below = figure.axes
    assert above.get_yscale() == "log" and below.get_yscale() == "linear"
    assert lines(below)["alibi"] == pytest.approx({64: 1.0, 128: 48 / 49, 256: 47.5 / 49})
    low, high = below.get_ylim()
    others = [v for name in EXPLODING if name != "sinusoidal" for v in lines(below)[name].values()]
    # the others take most of the height, and none of them is cut off
    assert low < min(others) and max(others) < high and max(others) - min(others) > 0.8 * (high - low)
    [mark] = [line for line in below.lines if line.get_label() == "_leaves"]
    ((x, y),) = mark.get_xydata()
    part = (high - 1) / (400 / 53 - 1)  # along the line from 64 to 128, straight over log2
    assert (x, y) == (pytest.approx(64 * 2**part), 1.0)
    assert (mark.get_marker(), mark.get_color()) == ("^", style.assign_looks(["sinusoidal"])["sinusoidal"].colour)
    assert "64" in below.get_ylabel() and "▲" in below.get_title()


def test_no_second_panel_where_nothing_is_squashed_or_the_training_length_was_not_measured():
    plain = {"a": {8: [50.0], 16: [52.0]}, "b": {8: [51.0], 16: [54.0]}, "c": {8: [52.0], 16: [57.0]}}
    assert len(sweep_curves.draw_perplexity(plain, shares(plain, 8), 8).axes) == 1
    [axes] = sweep_curves.draw_perplexity(EXPLODING, {name: {} for name in EXPLODING}, 32).axes
    assert axes.get_yscale() == "log"
    one = {"alibi": {64: [49.0]}}
    assert len(sweep_curves.draw_perplexity(one, shares(one, 64), 64).axes) == 1


def boxes(figure, axes):
    """What the names beside a panel cover, in pixels, from the lowest to the highest."""
    figure.draw_without_rendering()
    names = [text for text in axes.texts if not text.get_text().startswith("trained at")]
    # of the words alone, without the line that leads to them
    return sorted((Text.get_window_extent(text) for text in names), key=lambda box: box.y0)


def test_names_stand_at_the_ends_and_never_on_each_other():
    others = [name for name in SPECS if name not in EXPLODING][: MAX_LINES - len(EXPLODING)]
    near = {name: {64: [50.0], 128: [50 + k / 99]} for k, name in enumerate(others)} | EXPLODING
    near["sinusoidal"] = {64: [50.0], 128: [80.0]}
    figure = sweep_curves.draw_perplexity(near, shares(near, 64), 64)
    for axes in figure.axes:
        found, panel = boxes(figure, axes), axes.get_window_extent()
        assert len(found) == len(near)
        assert all(low.y1 <= high.y0 for low, high in pairwise(found))
        assert all(box.x0 > panel.x1 and box.x1 <= figure.bbox.x1 for box in found)
        assert found[0].y0 >= 0 and found[-1].y1 <= figure.bbox.y1
    # in the order of the ends
    ends = {name: list(points.values())[-1][0] for name, points in near.items()}
    names = [text for text in figure.axes[0].texts if text.get_text() in ends]
    by_height = sorted(names, key=lambda text: Text.get_window_extent(text).y0)
    assert [ends[text.get_text()] for text in by_height] == sorted(ends.values())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1), max_size=12).map(sorted), st.floats(0.01, 0.3), st.data())
def test_places_are_the_nearest_that_are_apart(wanted, apart, data):
    found = spread_labels(wanted, apart)
    assert len(found) == len(wanted) and all(b - a >= apart - 1e-9 for a, b in pairwise(found))
    free = 1 - apart * (len(wanted) - 1)
    if not wanted or free < 0:
        return
    assert -1e-9 <= found[0] and found[-1] <= 1 + 1e-9
    moves = data.draw(st.lists(st.floats(0, free), min_size=len(wanted), max_size=len(wanted)).map(sorted))
    other = [place + k * apart for k, place in enumerate(moves)]  # also apart, and in [0, 1]

    def distance(places):
        return sum((a - b) ** 2 for a, b in zip(places, wanted, strict=True))

    for part in (1.0, 0.01):  # no other choice is nearer, also not a little beside
        assert distance(found) <= distance([f + part * (o - f) for f, o in zip(found, other, strict=True)]) + 1e-9


def test_training_is_drawn_whole_and_its_second_half_again():
    curves = [("alibi", {25: 9.0, 50: 8.0, 100: 7.0}), ("alibi", {25: 9.5, 100: 7.5})]
    whole, late = sweep_curves.draw_training_loss(curves).axes
    first, second = (line.get_xydata().tolist() for line in whole.lines)
    assert (first, second) == ([[25, 9], [50, 8], [100, 7]], [[25, 9.5], [100, 7.5]])
    assert [line.get_xydata().tolist() for line in late.lines] == [[[50, 8], [100, 7]], [[100, 7.5]]]
    assert len({line.get_color() for line in whole.lines}) == 1
    [axes] = sweep_curves.draw_loss_by_position({"alibi": {0: 9.0, 3: 7.0}}).axes
    assert lines(axes) == {"alibi": {1: 9.0, 4: 7.0}}  # positions are counted from one


def test_a_figure_of_no_timing_has_a_message_and_negative_scores_are_shown():
    figure = timing.draw_attention_timing([], "a machine")
    assert [axes.get_title() for axes in figure.axes] == ["nothing was timed"]
    for scores, is_at_zero in (([-3.0, -5.0], False), ([3.0, 5.0], True)):
        curves = {("set", "matthews"): {"rope": {64: [scores[0]], 128: [scores[1]]}}}
        [axes] = panels(score_curves.draw_scores_over_length(curves, 64, {}))
        low, high = axes.get_ylim()
        assert low <= min(scores) < max(scores) <= high and (low == 0) == is_at_zero


def test_exact_match_has_a_panel_for_each_task():
    curves = {"copy": {"rope": {2: [100.0, 50.0], 9: [25.0, 25.0]}}, "sort": {"rope": {2: [80.0]}, "nope": {2: [0.0]}}}
    figure = sweep_curves.draw_exact_match(curves, {"copy": (2, 5), "sort": (2, 4)})
    copy, sort = panels(figure)
    assert (copy.get_title(), sort.get_title()) == ("copy\nmean of 2 seeds; bars: least to largest", "sort")
    drawn = {name: points for name, points in lines(copy).items() if not name.startswith("_")}
    assert drawn == {"rope": {2: 75.0, 9: 25.0}} and lines(sort) == {"rope": {2: 80.0}, "nope": {2: 0.0}}
    assert copy.lines[0].get_color() == sort.lines[0].get_color() != sort.lines[-1].get_color()
    assert copy.get_ylim() == sort.get_ylim()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["rope", "nope", "training range"]


def test_markers_of_equal_lines_are_apart_and_many_points_are_shaded_rather_than_barred():
    curve = {n: [100.0] for n in range(2, 60)}
    [axes] = sweep_curves.draw_exact_match({"copy": {"rope": curve, "interpolation": curve}}, {"copy": (2, 20)}).axes
    (first, every), (second, _) = (line.get_markevery() for line in axes.lines)
    assert (second - first) % every
    [axes] = sweep_curves.draw_exact_match(
        {"copy": {"rope": {n: [9.0, 11.0] for n in range(2, 60)}}}, {"copy": (4, 9)}
    ).axes
    assert axes.get_title().endswith("mean of 2 seeds; shaded: least to largest")
    [trained] = axes.patches
    assert (trained.get_x(), trained.get_width()) == (4, 5)
    [band] = axes.collections
    assert {y for _, y in band.get_paths()[0].vertices} == {9, 11}


def test_profiles_keep_heads_and_distances_and_heads_have_colours_of_their_own():
    values = {name: build(name, 5, 160).bias_profile(40) for name in ("type2", "inv_n")}
    figure = drawings.draw_profiles(values)
    [bar] = [axes for axes in figure.axes if axes.get_ylabel() == "head"]
    [mesh] = [one for one in bar.collections if isinstance(one, QuadMesh)]
    mesh.update_scalarmappable()
    shown = {tuple(colour) for colour in mesh.get_facecolors()}
    assert [label.get_text() for label in bar.get_yticklabels()] == ["1", "2", "3", "4", "5"]
    for axes, profile in zip(panels(figure), values.values(), strict=True):
        assert shown == {tuple(line.get_color()) for line in axes.lines} and len(shown) == len(axes.lines) == 5
        for line, head in zip(axes.lines, profile, strict=True):
            assert line.get_ydata().tolist() == pytest.approx((head - head.max()).clamp_min(-24).tolist())
            assert list(line.get_xdata()) == list(range(40))


def test_times_have_a_panel_for_each_encoding_and_one_scale():
    rows = [
        Timing(encoding, backend, step, n, 1.0, ratio * n, 0, 0)
        for (encoding, backend), ratio in {("alibi", "sdpa"): 1, ("alibi", "flex"): 2, ("fire", "sdpa"): 3}.items()
        for step in ("forward", "training")
        for n in (16, 32)
    ]
    figure = timing.draw_attention_timing([Timing(BASELINE, "sdpa", "forward", 16, 1, 1, 1, 1), *rows], "a machine")
    alibi, fire, *training = figure.axes
    assert [axes.get_title() for axes in (alibi, fire)] == ["alibi", "fire"] and len(training) == 2
    assert {axes.get_ylim() for axes in figure.axes} == {alibi.get_ylim()}
    sdpa, flex = (line for line in alibi.lines if len(line.get_xdata()) == 2 and line.get_marker() != "None")
    assert [line.get_ydata().tolist() for line in (sdpa, flex)] == [[16, 32], [32, 64]]
    own = style.assign_looks(["alibi"])["alibi"].colour
    assert sdpa.get_color() == flex.get_color() == own and sdpa.get_marker() != flex.get_marker()
    assert fire.lines[-1].get_marker() == sdpa.get_marker() and fire.lines[-1].get_color() != own


def test_encodings_keep_their_looks_and_never_share_one():
    known = list(SPECS)  # the built-in ones: other tests may have registered more
    alone = {name: style.assign_looks([name])[name] for name in known}
    others = ["type1:variant=paper", *(f"e{i}" for i in range(20))]
    together = style.assign_looks([*others, *reversed(known)])
    assert all(together[name] == alone[name] for name in known)
    assert len({look[:2] for look in together.values()}) == len(known) + len(others)
    assert together["type1:variant=paper"].colour == alone["type1"].colour
    assert {look.colour for look in together.values()} <= set(style.PALETTE)


def test_users_encodings_have_the_looks_that_they_are_registered_with(monkeypatch):
    """Without one, a look that no other encoding has; a derived class does not have that of its base class."""
    registry = encodings.base.registry
    monkeypatch.setattr(registry, "_table", dict(registry._table))
    monkeypatch.setattr(registry, "_looks", dict(registry._looks))
    mine, another = (type(name, (Alibi,), {}) for name in ("Mine", "Another"))
    registry.register("mine", colour="brown", marker="P")(mine)
    registry.register("another")(another)
    looks = style.assign_looks(["alibi", "mine", "mine:x=1", "another"])
    assert looks["mine"][:2] == ("#7F4A12", "P") and looks["mine:x=1"].colour == "#7F4A12"
    assert len({look[:2] for look in looks.values()}) == 4
    for chosen in (
        {"colour": "brown"},
        {"marker": "P"},
        {"colour": "red", "marker": "P"},
        {"colour": "pink", "marker": "os"},
    ):
        with refused("give both or neither, a colour of blue, vermilion"):
            encodings.register("other", **chosen)


def test_what_is_compared_is_told_apart_also_without_colours():
    encodings_own = {look.colour for look in style.assign_looks(list(SPECS)).values()}
    moved = style.assign_looks(["rope", "interpolation", "warping", "randomized"])
    assert len({look.colour for look in moved.values()}) == 4
    assert not encodings_own & {moved[name].colour for name in ("interpolation", "warping", "randomized")}
    for names in (
        ("rope", "interpolation", "warping"),
        ("sinusoidal", "alibi", "type1", "inv_n"),
        ("type1", "type2", "kerple_log", "kerple_power", "fire", "t5_bias", "inv_n"),
    ):
        assert len({(look.marker, str(look.dashes)) for look in style.assign_looks(names).values()}) == len(names)


@pytest.fixture
def saved(monkeypatch) -> list[str]:
    """The names of the files that are written; drawing them takes long, and other tests read them."""
    names: list[str] = []
    monkeypatch.setattr(figure_gallery, "save", lambda figure, *paths: names.extend(path.name for path in paths))
    return names


def spy(patch: pytest.MonkeyPatch, name: str) -> list:
    """What a function of the drawings is given."""
    given: list = []
    patch.setattr(drawings, name, lambda *args: given.extend(args) or Figure((1, 1)))
    return given


def named(*stems: str) -> list[str]:
    return [f"{stem}.{ending}" for stem in stems for ending in ("png", "pdf")]


def test_command_on_all_encodings(tmp_path, monkeypatch, saved):
    # other tests may have registered encodings of their own
    monkeypatch.setattr(encodings, "names", lambda: list(SPECS))
    shown = spy(monkeypatch, "draw_profiles")
    output = run_here("figures", "--out", tmp_path, "--length", "48", "--heads", "2", "--head", "2").stdout
    assert saved == named("heat_maps", "profiles", "profiles_compared", "trf")
    assert "not drawn, perplexity: needs --sweep" in output and str(tmp_path / "heat_maps.png") in output
    none = {"nope", "sinusoidal", "learned", "rope", "xpos", "longrope", "clex", "fope", "pope", "bipe"}
    none |= {"complex", "floater", "abacus", "coupled"}
    # every built-in encoding with a bias
    assert {name.partition(":")[0] for name in shown[0]} == set(SPECS) - none - {*REGION_ROPES, *CONTENT}
    assert all(profile.shape == (2, 48) for profile in shown[0].values())


@pytest.fixture
def sweep(tmp_path):
    """A folder as a sweep leaves it: kerple_log and fire of two layers, one method without bias."""
    state = {
        "layout": 2,
        "settings": {"tokens": 16, "split": "test"},
        "encodings": ["kerple_log", "fire", "rope"],
        "seeds": [3],
    }
    (tmp_path / "sweep.json").write_text(json.dumps(state))
    for name, layers in (("kerple_log", 1), ("fire", 2), ("rope", 1)):
        folder = tmp_path / "runs" / Method(name, name).run_name(3)
        change = p_of_heads(0.9, 1.5, 2.0, 3.0) if name == "kerple_log" else None
        save_checkpoint(folder, name, layers, change)
        (folder / "checkpoints" / "run.json").write_text(json.dumps({"layout": 2, "finished": {"checkpoint": "c"}}))
        given = {"checkpoint": "c", "split": "test", "tokens": 9, "loss_base2": 1.0}
        rows = [{**given, "length": n, "ppl": 9.0 + n / 99} for n in (16, 32)]
        (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_command_on_a_sweep_uses_what_was_learned(sweep, monkeypatch, saved):
    shown, asked = spy(monkeypatch, "draw_profiles"), spy(monkeypatch, "draw_query_biases")
    output = run_here("figures", "--sweep", sweep, "--seed", "3", "--length", "40").stdout
    expected = ("heat_maps", "profiles", "profiles_compared", "trf", "ppl", "ppl_mean", "queries-fire-seed3")
    assert saved == named(*expected) and "not drawn, biases over training" in output
    assert list(shown[0]) == ["kerple_log", "fire (layer 0)", "fire (layer 1)"]
    state = torch.load(sweep / "runs" / "fire-seed3" / "checkpoints" / "checkpoint_last.pt")["model"]
    second, prefix = build("fire", 4, 32, 64), "decoder.encodings.1."
    second.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    assert torch.equal(shown[0]["fire (layer 1)"], second.bias_profile(40))
    biases, name, layers = asked
    assert name == "fire" and layers == [0, 1] and list(biases) == [8, 16, 40]
    j = torch.arange(17, dtype=torch.float64)[None]
    assert torch.allclose(biases[16][1], second.bias(j[:, -1:], j)[0, :, 0], rtol=0, atol=1e-12)


def test_queries_of_a_sweep_have_the_layers_of_the_model_and_end_with_the_table():
    models = {"mixed": build_for_model("nope|fire", 4, 32, 4, 16, None, "layer")}
    models["table"] = build_for_model("tupe", 4, 32, 4, 16)
    record = Namespace(settings=Namespace(tokens=16))
    gallery = Namespace(encodings=models, record=record, length=16, seed=1)
    mixed, table = figure_gallery._draw_learned_query_biases(gallery).values()
    titles = [f"query {query}, layer {layer}" for query in (8, 16) for layer in (1, 3)]
    assert [axes.get_title() for axes in panels(mixed)] == titles
    assert [axes.get_title() for axes in panels(table)] == ["query 8"]


def test_what_does_not_go_together_is_refused(tmp_path, capsys):
    """The other refusals are in tests/test_bad_input.py."""
    assert "named twice" in error_of(capsys, "figures", "alibi", "alibi", "--out", tmp_path / "out")
    assert "--heads does not go with --sweep" in error_of(capsys, "figures", "--sweep", tmp_path, "--heads", "4")
    assert not any(tmp_path.iterdir())


def stir(encoding):
    with torch.no_grad():
        for p in encoding.parameters():
            p.mul_(1.5)


def of_checkpoint(path, queries=(), layers=()):
    """Of each panel its title and its lines: (key positions, values) of each head."""
    figure = figure_gallery.draw_query_biases(path, queries, layers)
    return {axes.get_title(): [line.get_data() for line in axes.lines] for axes in panels(figure)}


def test_each_layer_and_query_of_a_checkpoint_is_the_learned_bias_itself(tmp_path):
    path, layers = save_checkpoint(tmp_path, "fire", 4, stir, decoder_layers=4)
    found, places = of_checkpoint(path, (12, 100), (1, 3)), [(i, k) for i in (12, 100) for k in (1, 3)]
    assert list(found) == [f"query {i}, layer {k}" for i, k in places]
    for (i, k), curves in zip(places, found.values(), strict=True):
        j = torch.arange(i + 1.0, dtype=torch.float64)[None]
        wanted = layers[k].double().bias(j[:, -1:], j)[0, :, 0]
        assert len(curves) == 4
        for (x, y), head in zip(curves, wanted, strict=True):
            assert list(x) == list(range(i + 1)) and y.tolist() == pytest.approx(head.tolist(), abs=1e-9)


def test_defaults_are_the_training_length_and_four_layers(tmp_path):
    path, _ = save_checkpoint(tmp_path / "a", "fire", 6, decoder_layers=6)
    assert list(of_checkpoint(path)) == [f"query {i}, layer {k}" for i in (32, 64, 128) for k in (0, 2, 3, 5)]
    path, _ = save_checkpoint(tmp_path / "b", "fire", 1, decoder_layers=6)
    assert list(of_checkpoint(path)) == ["query 32", "query 64", "query 128"]  # one for all layers
    path, _ = save_checkpoint(tmp_path / "c", "alibi", 1)  # a bias of the distance: by key position as well
    [((x, y), *_)] = of_checkpoint(path, (3,)).values()
    assert list(x) == [0, 1, 2, 3] and y.tolist() == [-0.75, -0.5, -0.25, 0.0]


def test_the_command_draws_a_checkpoint(tmp_path):
    path, _ = save_checkpoint(tmp_path, "fire", 2, decoder_layers=2)
    out = tmp_path / "out"
    said = run_here("figures", "--checkpoint", path, "--query", "8,20", "--layers", "1", "--out", out).stdout
    assert said == f"{out / 'queries.png'}, also as .pdf\n"
    assert sorted(p.name for p in out.iterdir()) == ["queries.pdf", "queries.png"]


@pytest.mark.parametrize(
    ("spec", "flags", "words"),
    [
        ("fire", ["--layers", "1,2"], "--layers 2: {path} has layers 0 to 1"),
        ("fire", ["--query", ",".join(map(str, range(17)))], "names 17 positions: choose at most 16"),
        ("rope", [], "{path} has no additive bias to draw, its encoding is 'rope'"),
        ("fire", ["alibi"], "--checkpoint is drawn by itself"),
    ],
)
def test_what_a_checkpoint_lacks_is_refused(tmp_path, capsys, spec, flags, words):
    path, _ = save_checkpoint(tmp_path, spec, 2 if spec == "fire" else 1)
    error = error_of(capsys, "figures", *flags, "--checkpoint", path, "--out", tmp_path / "out")
    assert words.format(path=path) in error and not (tmp_path / "out").exists()


def test_layers_are_of_a_checkpoint(tmp_path, capsys):
    error = error_of(capsys, "figures", "fire", "--layers", "0", "--out", tmp_path / "out")
    assert "give --checkpoint FILE too" in error and not (tmp_path / "out").exists()


def test_a_sweep_is_not_mixed_with_specs_and_needs_a_finished_run(sweep, capsys):
    for argv, words in (
        (["alibi", "--sweep", str(sweep)], "not both"),
        (["--sweep", str(sweep), "--heads", "4"], "--heads does not go with --sweep"),
        (["--sweep", str(sweep)], "no finished run of seed 1"),
    ):
        assert words in error_of(capsys, "figures", *argv)


def test_a_folder_of_questions_is_refused_before_anything_is_drawn(sweep, capsys, monkeypatch):
    (sweep / "asked").mkdir()
    (sweep / "asked" / "answers.json").write_text("{}")
    before = sorted(sweep.rglob("*"))
    monkeypatch.setattr(figure_gallery, "draw_gallery", None)
    argv = ["figures", "--sweep", str(sweep), "--seed", "3", "--data", str(sweep / "asked")]
    said = error_of(capsys, *argv)
    assert f"{sweep / 'asked'} holds questions, which are not one text: name a folder of fairseq-rpe prepare" in said
    assert sorted(sweep.rglob("*")) == before


def test_at_most_nine_lengths_have_numbers():
    axes = Figure().subplots()
    style.set_length_axis(axes, [2**k for k in range(10)])
    named = [label.get_text() for label in axes.get_xticklabels()]
    assert named == ["", "2", "", "8", "", "32", "", "128", "", "512"]


def test_maps_of_exact_answers_name_task_and_seeds_alone():
    curves = {f"rope:base={k}": {2: [80.0, 90.0], 9: [20.0, 30.0]} for k in range(MAX_LINES + 1)}
    [axes] = panels(sweep_curves.draw_exact_match({"copy": curves}, {"copy": (2, 5)}))
    assert axes.get_title() == "copy\nmean of 2 seeds"  # a map has no bars to explain
