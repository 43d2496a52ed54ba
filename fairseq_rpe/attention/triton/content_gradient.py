"""Arguments and gradients of the terms of a bias that depend on the tokens.

The gradient of a term of a query is the sum of dS over its keys. As delta is corrected so that the dS of a query sum to
0 (``kernels.query_gradient``), this sum is known without a kernel. The sum over the queries of a key comes from the
kernel of dK. In a table of products, each column but the last is one pair's, so a kernel stores the dS of these pairs
and no others. The last column, of all larger distances, is the sum over all pairs of the token less those stored.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_rpe.attention.toeplitz_attention import LOG2E
from fairseq_rpe.attention.triton.bias_gradient import square_tiles
from fairseq_rpe.attention.triton.tiles import (
    BY_KEY,
    BY_QUERY,
    LENGTHS,
    TOKENS,
    content_of_head,
    load_query_rows,
    query_indices,
    score_gradients,
)
from fairseq_rpe.attention.triton.tuning import run

# flags of CONTENT, and the number of tensors of each term, in the order of ``content_terms.content_tensors``
_TERMS = (
    (TOKENS.value, ("query_terms", "key_terms")),
    (BY_QUERY.value, ("query_table",)),
    (BY_KEY.value, ("key_table",)),
)


def content_flags(tensors: dict[str, Tensor]) -> int:
    """Return CONTENT of the kernels for the tensors that :func:`content_terms.content_tensors` returns."""
    return sum(flag for flag, names in _TERMS if names[0] in tensors)


def content_names(flags: int) -> list[str]:
    """Return the names of the tensors of the terms with these flags, in order."""
    return [name for flag, names in _TERMS if flags & flag for name in names]


def content_arguments(q: Tensor, flags: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the kernels' arguments of the terms with these flags; q replaces tensors that are not read."""
    named = dict(zip(content_names(flags), tensors, strict=True))
    args: dict[str, Any] = {"CONTENT": flags}
    for name in ("query_terms", "key_terms"):
        args[name] = _with_rounding_errors(named[name]) if name in named else q
    for name, columns in (("query_table", "query_columns"), ("key_table", "key_columns")):
        args |= {name: named.get(name, q), columns: named[name].shape[3] if name in named else 1}
    return args


def _with_rounding_errors(x: Tensor) -> Tensor:
    """Return (B, H, 2, n) float32: numbers x (B, H, n) in base 2, and the errors of their rounding to float32."""
    wide = x.double() * LOG2E
    rounded = wide.float()
    errors = (wide - rounded).float().nan_to_num(nan=0.0)  # infinity less itself is NaN
    return torch.stack([rounded, errors], dim=2)


def dense_content_bias(n: int, m: int, flags: int, tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum (B, H, n, m) of the terms with these flags by differentiable operations."""
    named = dict(zip(content_names(flags), tensors, strict=True))
    terms = []
    if "query_terms" in named:
        terms.append((named["query_terms"][..., None] + named["key_terms"][:, :, None]).float())
    index = torch.arange(m, device=tensors[0].device)
    distance = (index[m - n :, None] - index).clamp_min(0)  # (n, m)
    if "query_table" in named:
        table = named["query_table"]
        column = distance.clamp_max(table.shape[3] - 1).expand(*table.shape[:2], -1, -1)  # (B, H, n, m)
        terms.append(table.gather(3, column))
    if "key_table" in named:
        table = named["key_table"]
        column = distance.clamp_max(table.shape[3] - 1).mT.expand(*table.shape[:2], -1, -1)  # (B, H, m, n)
        terms.append(table.gather(3, column).mT)
    return functools.reduce(torch.add, terms)


@triton.jit(do_not_specialize=LENGTHS[:5])
def content_sums(
    q, k, v, grad, lse, delta, query_sums, key_sums, table, at_q, at_k, until,
    q_b, q_h, q_n, k_b, k_h, k_n, at_q_b, at_k_b, n, m, columns, scale, cap,
    query_terms, key_terms, query_table, key_table, query_columns, key_columns,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the dS of one block of queries of a head by query, or by key, and distance, but for the last column.

    query_sums (B, H, n, query_columns) and key_sums (B, H, m, key_columns), or None, contain zeros before. The loop
    skips keys that are farther than all columns.
    """
    start = tl.program_id(0) * SIZE
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, SIZE)
    at, at_q_block = query_indices(start, rows, at_q + batch * at_q_b, n, m, BIAS)
    offset, per_head = batch * q_b + head * q_h, batch * tl.num_programs(1) + head
    per_row = per_head * n
    block = load_query_rows(
        q + offset, grad + offset, lse + per_row, delta + per_row, start, rows, q_n, n, WIDTH, BLOCK_D
    )
    key_offset = batch * k_b + head // GROUP * k_h
    keys, values = k + key_offset, v + key_offset
    head_args = (table + head * columns, at_k + batch * at_k_b, until + batch * m, columns, scale, cap)
    content = content_of_head(
        query_terms, key_terms, query_table, key_table, per_head, n, m, query_columns, key_columns
    )  # fmt: skip
    nearest = tl.maximum(start + m - n + 2 - tl.maximum(query_columns, key_columns), 0)
    for first in range(nearest // SIZE * SIZE, tl.minimum(start + SIZE + m - n, m), SIZE):
        ds, _, _ = score_gradients(
            block, start + m - n - first, at, at_q_block, first, rows, keys, values, k_n, m, head_args, content,
            WIDTH, BLOCK_D, BIAS, CONTENT, PADDED, True, CAPPED,
        )  # fmt: skip
        i, j = (start + rows)[:, None], (first + rows)[None, :]
        distance = at[:, None] - j
        visible = (distance >= 0) & (i < n)
        if query_sums is not None:
            address = query_sums + per_row * query_columns + (i * query_columns + distance)
            tl.store(address, ds, mask=visible & (distance < query_columns - 1))
        if key_sums is not None:
            address = key_sums + per_head * m * key_columns + (j * key_columns + distance)
            tl.store(address, ds, mask=visible & (distance < key_columns - 1))


def content_gradients(
    shared: dict[str, Any],
    needed: Sequence[bool],
    tensors: Sequence[Tensor],
    query_sums: Tensor,
    key_sums: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of the tensors of the terms that depend on the tokens; None for those that are not needed.

    Args:
        shared: the kernels' common arguments by name, including grad, lse and delta.
        needed: whether the gradient of each tensor is needed.
        tensors: tensors of the terms, in the order of :func:`content_names`.
        query_sums: (B, H, n) float32, sums of dS over the keys of each query.
        key_sums: (B, H, m) float32, sums of dS over the queries of each key; None if no gradient of keys is needed.
    """
    named = dict(zip(content_names(shared["CONTENT"]), zip(tensors, needed, strict=True), strict=True))
    sums: dict[str, Tensor | None] = {"query_terms": query_sums, "key_terms": key_sums}
    stored = {name: torch.zeros_like(x) for name, (x, need) in named.items() if need and name.endswith("_table")}
    if stored:
        size, options = square_tiles(content_sums, shared)
        blocks = triton.cdiv(shared["n"], size)
        outputs = {"query_sums": stored.get("query_table"), "key_sums": stored.get("key_table")}
        run(content_sums, lambda meta: blocks, shared, shared["q"].shape[1], **outputs, **options)
    for name, total in (("query_table", query_sums), ("key_table", key_sums)):
        if name in stored and total is not None:
            stored[name][..., -1] = total - stored[name][..., :-1].sum(-1)
    sums |= stored
    return [
        total.to(x.dtype) if need and (total := sums.get(name)) is not None else None
        for name, (x, need) in named.items()
    ]
