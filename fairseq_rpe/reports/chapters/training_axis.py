"""The chapter on the perplexity along the training: figure and table of the ratio by tokens trained."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from fairseq_rpe.figures.training_axis import draw_training_axis
from fairseq_rpe.reports.page import Picture, svg_picture
from fairseq_rpe.reports.sweep_results import Perplexities, TrainingPoint, group_by
from fairseq_rpe.reports.training_axis import curve_by_tokens, longest_points
from fairseq_rpe.utils.table import Table, TableRow, cell_with_range


class AxisBlocks(NamedTuple):
    """Blocks of the chapter, and its figure for files."""

    picture: Picture
    table: Table
    figure: Figure


def training_axis_blocks(perplexities: Perplexities) -> AxisBlocks | None:
    """Build figure and table of the ratio of perplexities along the training.

    Args:
        perplexities: results of a sweep.

    Returns:
        The blocks; None if no checkpoint on the way was evaluated at two lengths.
    """
    points, first = longest_points(perplexities.training_axis), perplexities.train_length
    if not points or points[0].length == first:
        return None
    longest = points[0].length
    curves = {
        method: [curve_by_tokens(points, method, seed) for seed in dict.fromkeys(p.seed for p in of_method)]
        for method, of_method in group_by(points, lambda point: point.method).items()
    }
    figure = draw_training_axis(curves, longest, first)
    caption = f"Perplexity at {longest} tokens divided by perplexity at {first} tokens, by tokens trained."
    lasts = [f"{method} {list(seeds[0].values())[-1]:.3f}" for method, seeds in curves.items()]
    picture = svg_picture(figure, f"{caption} At the end of the training: {', '.join(lasts)}.", caption)
    return AxisBlocks(picture, _ratio_table(points, longest, first), figure)


def _ratio_table(points: Sequence[TrainingPoint], longest: int, first: int) -> Table:
    """Return the table of the ratios: methods × updates."""
    tokens: dict[int, int] = {}
    for point in sorted(points, key=lambda point: point.updates):
        tokens.setdefault(point.updates, point.tokens or 0)
    rows = []
    for method, of_method in group_by(points, lambda point: point.method).items():
        seeds = {n: [p.ratio for p in of_method if p.updates == n and p.ratio is not None] for n in tokens}
        means = {n: sum(values) / len(values) if values else None for n, values in seeds.items()}
        rows.append(TableRow(method, [cell_with_range(means[n], ".3f", seeds[n]) for n in tokens]))
    caption = f"Perplexity at {longest} tokens divided by perplexity at {first} tokens, by tokens trained."
    return Table(caption, ["encoding", *(f"{count:,}" for count in tokens.values())], rows)
