"""The figures of a sweep: perplexity against evaluation length, loss over training."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli.report import mean, names_and_lengths
from fairseq_rpe.core.files import replace_with
from fairseq_rpe.figures.style import looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: list[dict[str, Any]], trained_at: int, paths: list[Path]) -> None:
    """Draw once, save to every path in the format of its ending."""
    figure = perplexity(rows, trained_at)
    for path in paths:
        replace_with(path, lambda target: figure.savefig(target, dpi=160))


def perplexity(rows: list[dict[str, Any]], trained_at: int) -> Figure:
    """Perplexity per token against evaluation length, mean and range over seeds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    encodings, lengths = names_and_lengths(rows)
    shown = looks(encodings)
    figure = Figure(figsize=(6.4 if len(encodings) < 7 else 7.8, 4.2), layout="constrained")
    axes = figure.subplots()
    for spec in encodings:
        points = [(n, p) for n in lengths if (p := mean(rows, spec, n, "ppl")) is not None]
        colour, marker, dashes = shown[spec]
        drawn = {"color": colour, "marker": marker, "linestyle": dashes}
        axes.plot(*zip(*points, strict=True), **drawn, markersize=4, label=spec)
        if len({r["seed"] for r in rows if r["encoding"] == spec}) > 1:
            spans = [[r["ppl"] for r in rows if r["encoding"] == spec and r["length"] == n] for n, _ in points]
            low, high = [min(s) for s in spans], [max(s) for s in spans]
            axes.fill_between([n for n, _ in points], low, high, color=colour, alpha=0.2, linewidth=0)
    axes.axvline(trained_at, color="0.5", linestyle="--", linewidth=1, label=f"training length ({trained_at})")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("evaluation length (tokens)")
    axes.set_ylabel("perplexity per token")
    # many lines leave no room for their names among them
    beside = {} if len(encodings) < 7 else {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    axes.legend(frameon=False, fontsize="small", **beside)
    axes.grid(alpha=0.25)
    return figure


def training(curves: Sequence[tuple[str, Mapping[int, float]]]) -> Figure:
    """Training loss over updates, a line for each (label, loss by update); the second half once more, enlarged."""
    from matplotlib.figure import Figure

    shown = looks(list(dict.fromkeys(label for label, _ in curves)))
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    whole, late = figure.subplots(1, 2)
    last = max(update for _, loss in curves for update in loss)
    named: set[str] = set()
    for label, loss in curves:
        colour, marker, dashes = shown[label]
        drawn = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.2}
        drawn["markevery"] = max(1, len(loss) // 10)
        whole.plot(list(loss), list(loss.values()), **drawn, label=None if label in named else label)
        half = {update: value for update, value in loss.items() if 2 * update >= last}
        late.plot(list(half), list(half.values()), **drawn)
        named.add(label)
    whole.set(title="whole training", ylabel="training loss (bits per token)")
    late.set(title="second half")
    for axes in (whole, late):
        axes.set_xlabel("updates")
        axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def positions(curves: Mapping[str, Mapping[int, float]]) -> Figure:
    """Loss over the position in a block, a line for each label: its loss by the last position of each bucket."""
    from matplotlib.figure import Figure

    shown = looks(list(curves))
    figure = Figure(figsize=(7.8, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, loss in curves.items():
        colour, marker, dashes = shown[label]
        drawn = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 4}
        axes.plot([upto + 1 for upto in loss], list(loss.values()), **drawn, label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the block (tokens)", ylabel="loss (bits per token)")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG that is the same each time and needs no font."""
    from matplotlib import rc_context

    out = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "fairseq_rpe"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return out.getvalue()
