"""Figures as files that are whole or absent, and as SVG within a page."""

import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..core.files import replace_with


def save(figure: Figure, *paths: Path, dpi: int = 160) -> None:
    """Write to each path in the format of its ending; the same numbers give the same bytes."""
    for path in paths:
        undated = {"CreationDate": None} if path.suffix == ".pdf" else None
        replace_with(path, lambda target, undated=undated: figure.savefig(target, dpi=dpi, metadata=undated))


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG that is the same each time and needs no font."""
    out = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "fairseq_rpe"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    return out.getvalue()
