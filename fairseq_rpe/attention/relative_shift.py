"""Biases that depend on the tokens, for some queries at even positions: products with a table, shifted row by row.

Row i of a product has a column per distance; of a bias, one per key. What was read at x = W - 1 - d, W the keys, stands
r - 1 - i columns to the left, for row i of r: one column of padding and another shape of the same memory shift it
(the skewing of Huang et al. 2018, arXiv 1809.04281). What has no even positions is looked up pair by pair.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.reference import read_columns
from fairseq_rpe.core.bias import Bias, KeyTableBias, Positions, QueryTableBias, RelativeValues, SumBias, block


def quick_block(form: Bias, pos: Positions) -> Tensor:
    """The same as :func:`~fairseq_rpe.core.block` of all queries and keys, but for any numbers in the future."""
    if isinstance(form, SumBias):
        return functools.reduce(torch.add, (quick_block(one, pos) for one in form.forms))
    if isinstance(form, QueryTableBias) and _even(form, pos):
        return _by_query(form, pos.k.shape[1])
    if isinstance(form, KeyTableBias) and _even(form, pos):
        return _by_key(form, pos.q.shape[1])
    return block(form, pos)


def quick_read(found: Tensor, reading: RelativeValues, plan: Plan) -> Tensor:
    """The same as :func:`~fairseq_rpe.attention.reference.read_columns`."""
    if not _even(reading, plan.positions):
        return read_columns(found, reading, plan)
    vectors, keys = reading.vectors[:, reading.origin :].to(found.dtype), found.shape[3]
    near = min(vectors.shape[1] - 1, keys)  # distances before the table's last column
    weights = unskewed(found)
    out = torch.matmul(weights[..., keys - near :], vectors[:, :near].flip(1))
    return out + weights[..., : keys - near].sum(-1, keepdim=True) * vectors[:, None, -1]


def skewed(x: Tensor) -> Tensor:
    """(B, H, r, 1 + W), the first column padding -> (B, H, r, W): entry (i, j) is x[i, 1 + r - 1 - i + j]."""
    batch, heads, rows, cols = x.shape
    return x.reshape(batch, heads, cols, rows)[:, :, 1:].reshape(batch, heads, rows, cols - 1)


def unskewed(x: Tensor) -> Tensor:
    """(B, H, r, W), zero in the future -> the same shape: entry (i, y) is x[i, y - (r - 1 - i)], of distance W-1-y."""
    batch, heads, rows, cols = x.shape
    flat = F.pad(x.reshape(batch, heads, -1), (rows, 0))
    return flat.view(batch, heads, rows, cols + 1)[..., 1:]


def _even(table: QueryTableBias | KeyTableBias | RelativeValues, pos: Positions) -> bool:
    return pos.contiguous and pos.step == table.step


def _by_query(form: QueryTableBias, keys: int) -> Tensor:
    vectors = form.vectors[:, form.origin : form.origin + keys].to(form.query.dtype)
    found = torch.matmul(form.query, vectors.mT)
    padding = found[..., -1:].expand(-1, -1, -1, 1 + keys - found.shape[3])
    return skewed(torch.cat([padding, found.flip(3)], dim=3))


def _by_key(form: KeyTableBias, rows: int) -> Tensor:
    key, vectors = form.key, form.vectors[:, form.origin :].to(form.key.dtype)
    batch, heads, keys, _ = key.shape
    last = vectors.shape[1] - 1
    near = min(keys, last + rows)  # keys that some of the queries see before the table's last column
    far = torch.matmul(key[:, :, : keys - near], vectors[:, -1, :, None]).mT.expand(-1, -1, rows, -1)
    found = torch.matmul(key[:, :, keys - near :], vectors[:, :near].mT)
    beyond = found[..., -1:].expand(-1, -1, -1, near - found.shape[3])
    # column x is of distance x - rows, and key j of the near ones needs those from near - rows - j on
    table = torch.cat([found.new_zeros(1, 1, 1, 1).expand(batch, heads, near, rows), found, beyond], dim=3)
    lines = table.flatten(2)[..., near:].view(batch, heads, near, near + rows - 1)
    return torch.cat([far, lines[..., :rows].mT], dim=3)
