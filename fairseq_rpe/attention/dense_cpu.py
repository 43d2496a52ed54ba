"""Short texts on a CPU: the bias as one matrix per head, and the gradient of a learned one from whole matrices.

Leaving out the future would save less there than turning rows over costs, which a bias without a matrix needs. Up to
``SHORT`` tokens a matrix is at most twice a head's keys of width 64.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

SHORT = 128  # tokens
ELEMENTS = 1 << 18  # scores that are worked on at a time: with their gradients they stay in two cores' own caches
LOG2E = math.log2(math.e)  # powers of two take a CPU a quarter of the time of powers of e


def merged(x: Tensor) -> Tensor:
    """(B, h, …) -> (B·h, …): a view wherever it is written to, since a group is one row of the batch or all heads."""
    return x.flatten(0, 1)


def backward(
    saved: tuple[Tensor, ...], bias: Tensor, keep: Tensor | None, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, and with ``learned`` the gradient of the bias, all in float32 or better.

    saved: the output's gradient, q, k, v, the output, (B, H, n, D), and the log-sum-exp (B, H, n); bias: (H, n, n),
    -inf in the future; keep: the scaled dropout mask (B, H, n, n) or None.
    """
    grad, q, k, v, out, lse = saved
    rounded, scale = out.dtype != lse.dtype, q.shape[3] ** -0.5
    bias, lse, rooms = bias * LOG2E, lse * LOG2E, [_room(q, lse) for _ in range(2)]
    dq, dk, dv = (torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    found = torch.zeros_like(bias) if learned else None
    for at in _groups(q):
        g, qs, ks, vs, o = (merged(x[at].to(lse.dtype)) for x in (grad, q, k, v, out))
        qs, minus_delta = qs * scale, (g * o).sum(-1, keepdim=True).neg_()
        p, ds = (x[: len(qs)] for x in rooms)
        torch.sub(bias[at[1]], lse[at][..., None], out=p.unflatten(0, lse[at].shape[:2]))
        p.baddbmm_(qs, ks.mT, alpha=LOG2E).exp2_()
        if keep is None and not rounded:
            ds.copy_(minus_delta).baddbmm_(g, vs.mT)
        else:
            torch.bmm(g, vs.mT, out=ds)
            if keep is not None:
                ds.mul_(merged(keep[at]))
            # the same sum where the output was rounded, which sums of n² terms dS would show
            ds.add_(-torch.linalg.vecdot(p, ds)[..., None] if rounded else minus_delta)
        ds.mul_(p)
        if keep is not None:
            p.mul_(merged(keep[at]))
        torch.bmm(p.mT, g, out=merged(dv[at]))
        torch.bmm(ds.mT, qs, out=merged(dk[at]))
        torch.bmm(ds, ks, out=merged(dq[at]))
        if found is not None:
            found[at[1]] += ds.unflatten(0, lse[at].shape[:2]).sum(0)
    return dq.mul_(scale), dk, dv, found


def _groups(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of the batch and heads: some rows with all heads, or one row with some heads."""
    batch, heads, n, _ = q.shape
    fit = max(1, ELEMENTS // n**2)
    for row in range(0, batch, max(1, fit // heads)):
        for head in range(0, heads, fit):
            yield slice(row, row + max(1, fit // heads)), slice(head, head + fit)


def _room(q: Tensor, lse: Tensor) -> Tensor:
    """(G, n, n) for the scores of the largest group."""
    batch, heads, n, _ = q.shape
    fit = max(1, ELEMENTS // n**2)
    return lse.new_empty(min(fit, heads) * min(batch, max(1, fit // heads)), n, n)
