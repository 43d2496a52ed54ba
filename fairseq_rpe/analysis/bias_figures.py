"""Draws additive biases: the profile of each head over distance, and exp(bias) as a map of queries and keys.

Every function returns a matplotlib ``Figure`` and leaves the style of the process alone. matplotlib is imported when
something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import Positions, UserError, block
from ..encodings import Encoding
from .style import DASHES, PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELLS = 256  # queries and keys shown at most: a panel has no more pixels than that
_HEADS = 4


def require_bias(encoding: Encoding, spec: str, flag: str) -> None:
    """Refuse an encoding that adds nothing to the scores; ``flag`` is what asked for a picture of it.

    Raises:
        UserError: it has no additive bias.
    """
    if not encoding.adds_bias:
        raise UserError(f"{flag}: '{spec}' has no bias to show: drop the flag, or name an encoding with a bias")


def some_heads(heads: int, at_most: int = _HEADS) -> list[int]:
    """Indices of up to ``at_most`` heads, evenly spread from the first to the last."""
    if heads <= at_most:
        return list(range(heads))
    return [round(k * (heads - 1) / (at_most - 1)) for k in range(at_most)]


@torch.no_grad()
def bias_map(encoding: Encoding, length: int, heads: Sequence[int]) -> tuple[Tensor, int]:
    """The exact bias of ``heads`` at plain positions: (len(heads), n, n) float64, and the tokens between neighbours.

    Every token up to 256, beyond that every second, third, …; row i is the query, column j the key. The encoding has
    a bias.
    """
    first = next(encoding.parameters(), None)
    pos = Positions.arange(length, dtype=torch.float64, device=None if first is None else first.device)
    step = -(-length // _CELLS)
    shown = slice(0, None, step)
    return block(encoding.form(pos), pos, shown, shown)[0, list(heads)].cpu(), step


def profile_figure(profile: Tensor, title: str) -> Figure:
    """The log-bias (H, n) of each head over the distances 0 … n-1 in tokens."""
    # Figure itself rather than pyplot: no backend is chosen and nothing is left open.
    from matplotlib.figure import Figure

    heads, n = profile.shape
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for head, values in enumerate(profile.double().cpu()):
        axes.plot(
            range(n),
            values,
            color=PALETTE[head % len(PALETTE)],
            linestyle=DASHES[head // len(PALETTE) % len(DASHES)],
            linewidth=1.6,
            label=f"head {head + 1}",
        )
    axes.set(title=title, xlabel="distance (tokens)", ylabel="bias (nats)")
    axes.title.set_fontsize("medium")
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small", ncols=1 + (heads - 1) // 12
    )
    return figure


def exp_bias_figure(bias: Tensor, title: str, heads: Sequence[int], step: int) -> Figure:
    """exp(bias) as a map per head, keys to the right and queries downwards; the future stays grey.

    Args:
        bias: (H', n, n) log-bias of query × key, as :func:`bias_map` gives it.
        title: of the figure.
        heads: indices of the H' heads in their model, for the panel titles.
        step: tokens between neighbouring rows and columns.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    count, n, _ = bias.shape
    values = bias.double().cpu().exp()
    past = torch.ones(n, n, dtype=torch.bool).tril()
    seen = values[:, past]
    seen = seen[seen.isfinite()]
    top = seen.max().item() if len(seen) else 1.0
    scale = ScalarMappable(Normalize(0.0, top if top > 0 else 1.0), colormaps["viridis"].with_extremes(bad="0.9"))

    columns = count if count <= 2 else -(-count // 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.0 * columns + 0.8, 3.0 * rows + 0.4), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    low, high = -step / 2, (n - 0.5) * step
    for number, axes in enumerate(panels):
        if number >= count:
            axes.set_visible(False)
            continue
        shown = values[number].masked_fill(~past, torch.nan)
        # nearest: a blend of two cells is nobody's bias
        axes.imshow(shown, norm=scale.norm, cmap=scale.cmap, interpolation="nearest", extent=(low, high, high, low))
        axes.set_title(f"head {heads[number] + 1}", fontsize="small")
        axes.locator_params(nbins=5, integer=True)
        axes.tick_params(labelsize="small")
    figure.colorbar(scale, ax=panels[:count], label="exp(bias)", shrink=0.9)
    figure.suptitle(title, fontsize="medium")
    every = f", one in {step} shown" if step > 1 else ""
    figure.supxlabel(f"key (tokens{every})", fontsize="small")
    figure.supylabel(f"query (tokens{every})", fontsize="small")
    return figure
