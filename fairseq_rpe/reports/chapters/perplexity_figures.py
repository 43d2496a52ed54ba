"""Figures of perplexity over length: lines, or for many methods a dot plot and the lines of a few of them."""

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.figures.dot_plot import encoding_family, select_extremes
from fairseq_rpe.figures.heat_maps import MAX_LINES, exceeds_line_limit
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.page import Picture, svg_picture
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.reports.uncertainty import ClusteredScores
from fairseq_rpe.sweeps.sweep_record import Method


def draw_perplexity(methods: Mapping[str, Method], perplexities: Perplexities, text: str = "") -> Figure:
    """Draw the perplexity of all methods by length: lines, or a dot plot if there are too many methods.

    Args:
        methods: the methods by name.
        perplexities: results on the text.
        text: name of the text; empty for the training text.
    """
    names = perplexities.encodings
    families, intervals = {}, {}
    if exceeds_line_limit(names):
        families = {name: encoding_family(methods[name].rpe) for name in names}
        intervals = ratio_intervals(perplexities)
    return sweep_curves.draw_perplexity(
        {name: perplexities.values_by_length(name) for name in names},
        {name: perplexities.ratios_by_length(name) for name in names},
        perplexities.train_length,
        text,
        families,
        intervals,
    )


def draw_extremes(methods: Mapping[str, Method], perplexities: Perplexities, text: str = "") -> Figure | None:
    """Draw the perplexity of the methods with the lowest and the highest ratio of each family as lines.

    Args:
        methods: the methods by name.
        perplexities: results on the text.
        text: name of the text; empty for the training text.

    Returns:
        The figure; None if all methods fit into the figure of :func:`draw_perplexity` as lines, or if fewer than two
        have a ratio.
    """
    if not exceeds_line_limit(perplexities.encodings) or perplexities.lengths[-1] <= perplexities.train_length:
        return None
    ratios = {name: ratio for name in perplexities.encodings if (ratio := perplexities.final_ratio(name)) is not None}
    chosen = select_extremes(ratios, {name: encoding_family(methods[name].rpe) for name in ratios})
    if len(chosen) < 2:
        return None
    curves = {name: perplexities.values_by_length(name) for name in chosen}
    shares = {name: perplexities.ratios_by_length(name) for name in chosen}
    return sweep_curves.draw_perplexity(curves, shares, perplexities.train_length, text)


def perplexity_caption(perplexities: Perplexities, figure: Figure, text: str = "", seeds: int = 1) -> str:
    """Return the caption of :func:`draw_perplexity`.

    Args:
        perplexities: results on the text.
        figure: the figure.
        text: name of the text; empty for the training text.
        seeds: number of trainings of each method.
    """
    on, train_length = f" on {text}" if text else "", perplexities.train_length
    if not exceeds_line_limit(perplexities.encodings):
        caption = (
            f"Perplexity per token{on} against evaluation length; dashed: the training length of {train_length} tokens."
        )
        if len(figure.axes) > 1:
            caption += f" Below: ratio to the perplexity at {train_length} tokens, enlarged."
        return caption + (" Mean over the seeds; bars from the lowest to the highest seed." if seeds > 1 else "")
    longest = perplexities.lengths[-1]
    lengths = f"perplexity per token{on} at each length; the numbers are those at {longest} tokens"
    colours = "Colours and markers are families of encodings. An arrow marks a value beyond the axis."
    if len(figure.axes) == 1:
        return f"{lengths[0].upper()}{lengths[1:]}. {colours}"
    means = " of the mean over the seeds" if seeds > 1 else ""
    errors = f" Bars are 95 % intervals{means} for the choice of the text." if ratio_intervals(perplexities) else ""
    points = " Small points are the seeds." if seeds > 1 else ""
    return (
        f"Left: ratio of the perplexity{on} at {longest} tokens to that at {train_length} tokens, the training length, "
        f"by which the methods are sorted.{errors}{points} Right: {lengths}. {colours}"
    )


def extremes(methods: Mapping[str, Method], perplexities: Perplexities, text: str = "") -> list[Picture]:
    """Build the picture of :func:`draw_extremes`; nothing if there is none."""
    figure = draw_extremes(methods, perplexities, text)
    if figure is None:
        return []
    caption = (
        f"Perplexity per token{f' on {text}' if text else ''} against evaluation length, for the methods with the "
        f"lowest and the highest ratio of each family. If there are more than {MAX_LINES}, methods with the highest "
        "ratio of small families are left out."
    )
    return [svg_picture(figure, caption, caption)]


def loss_change(perplexities: Perplexities, name: str) -> ClusteredScores | None:
    """Return the differences of the losses at the longest length and at the training length, None if unknown."""
    losses = perplexities.losses_by_length(name)
    start, end = losses.get(perplexities.train_length), losses.get(perplexities.lengths[-1])
    if start is None or end is None or start.identity != end.identity:
        return None
    return end.minus(start)


def ratio_intervals(perplexities: Perplexities) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of the ratio of each method whose losses have segments."""
    intervals = {}
    for name in perplexities.encodings:
        ratio, change = perplexities.final_ratio(name), loss_change(perplexities, name)
        if ratio is None or change is None:
            continue
        low, high = uncertainty.perplexity_interval(ratio, change.estimate())
        if math.isfinite(high - low):
            intervals[name] = (low, high)
    return intervals
