"""Figures as files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ..core.files import replace_with


def save(figure: Figure, *paths: Path, dpi: int = 160) -> None:
    """Write to each path in the format of its ending; the same numbers give the same bytes."""
    for path in paths:
        undated = {"CreationDate": None} if path.suffix == ".pdf" else None
        replace_with(path, lambda target, undated=undated: figure.savefig(target, dpi=dpi, metadata=undated))
