"""The figure of a sweep: perplexity against evaluation length."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.files import replace_with
from fairseq_rpe.cli.report import mean, names_and_lengths

# Okabe and Ito's colours, told apart with any kind of colour vision.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_FIXED = {"sinusoidal": 0, "alibi": 1, "type1": 2, "inv_n": 3, "kerple_log": 4, "t5": 5, "none": 6}
_MARKERS = "os^Dv<>P"


def style(encodings: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker per spec: a name keeps its colour in every figure where that is possible."""
    taken: set[tuple[int, int]] = set()
    count = len(PALETTE)
    styles = {}
    for spec in encodings:
        name = spec.partition(":")[0]
        colour = _FIXED.get(name, zlib.crc32(name.encode()) % count)
        places = [(c % count, m) for m in range(len(_MARKERS)) for c in range(colour, colour + count)]
        place = next((p for p in places if p not in taken), places[0])
        taken.add(place)
        styles[spec] = (PALETTE[place[0]], _MARKERS[place[1]])
    return styles


def draw(rows: list[dict[str, Any]], trained_at: int, paths: list[Path]) -> None:
    """Draw once, save to every path in the format of its ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    encodings, lengths = names_and_lengths(rows)
    styles = style(encodings)
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for spec in encodings:
        points = [(n, p) for n in lengths if (p := mean(rows, spec, n, "ppl")) is not None]
        colour, marker = styles[spec]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=spec)
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
    axes.legend(frameon=False, fontsize="small")
    axes.grid(alpha=0.25)
    for path in paths:
        replace_with(path, lambda target: figure.savefig(target, dpi=160))
    pyplot.close(figure)
