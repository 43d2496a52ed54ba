"""Triton kernels of causal attention with a bias: forward, dQ, and dK with dV.

Query i has the absolute index ``at = i + m - n`` and sees the keys j <= at. ``tiles`` describes the arguments. The last
dimension of each tensor is dense. A program loops over the blocks of keys below the diagonal, which all of its queries
see, and then over the blocks on the diagonal; the two loops are compiled separately. With a window, the first loop
begins with the first block that any query of the program sees.
"""

import triton
import triton.language as tl

from fairseq_rpe.attention.prune import BLOCK
from fairseq_rpe.attention.triton.tiles import (
    LENGTHS,
    content_of_head,
    dot,
    load,
    load_query_rows,
    logits,
    query_indices,
    round_to,
    score_gradients,
    store,
)

PRUNE_BLOCK = tl.constexpr(BLOCK)  # a multiple of all sizes of blocks here


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q, k, v, out, low, lse, table, at_q, at_k, until, null, first,
    q_b, q_h, q_n, k_b, k_h, k_n, at_q_b, at_k_b, n, m, window, columns, scale, cap, lengths,
    query_terms, key_terms, query_table, key_table, query_columns, key_columns,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of one block of queries of one head by online softmax, key block by key block.

    lengths: class of lengths, which only the autotuner reads, here and below.
    low: None, or in out's layout the rounding error of ``out``, for the backward pass.
    first: None, or int32 (B, H, n / BLOCK) first key that each ``prune.BLOCK`` of queries reads, a multiple of it.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at, at_q_block = query_indices(start, rows, at_q + batch * at_q_b, n, m, BIAS)
    q_block = load(q + batch * q_b + head * q_h, start, rows, q_n, n, WIDTH, BLOCK_D)
    key_offset = batch * k_b + head // GROUP * k_h
    keys, values = k + key_offset, v + key_offset
    per_head = batch * tl.num_programs(1) + head
    head_args = (table + head * columns, at_k + batch * at_k_b, until + batch * m, columns, scale, cap)
    content = content_of_head(
        query_terms, key_terms, query_table, key_table, per_head, n, m, query_columns, key_columns
    )  # fmt: skip
    # of the keys read so far: Σ exp2(s - top)·v, Σ exp2(s - top), and the largest logit
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if null is not None:  # as if a key with this logit and the value 0 had been read
        top = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.load(null + head)
        total += 1.0
    below = (start + m - n + 1) // BLOCK_N * BLOCK_N  # keys that the block's first query sees, whole blocks of them
    last = tl.minimum(start + BLOCK_M + m - n, m)
    far, unseen = 0, 0.0  # first key to read; log-sum-exp of a query that sees no key
    if first is not None:
        decided = tl.cdiv(n, PRUNE_BLOCK)
        far = tl.load(first + per_head * decided + start // PRUNE_BLOCK)
        unseen = float("-inf")  # pruning reads it from the log-sum-exp, and there is no backward pass
    if window is not None:
        far = tl.maximum(start + m - n - window + 1, far) // BLOCK_N * BLOCK_N
    for diagonal in tl.static_range(2):
        for begin in range(below if diagonal else far, last if diagonal else below, BLOCK_N):
            k_block = load(keys, begin, cols, k_n, m, WIDTH, BLOCK_D, not diagonal)
            v_block = load(values, begin, cols, k_n, m, WIDTH, BLOCK_D, not diagonal)
            product, gap, j = dot(q_block, tl.trans(k_block)), start + m - n - begin, begin + cols
            s, _ = logits(
                product, gap, at[:, None], j[None, :], at_q_block[:, None], m, head_args, content,
                BIAS, CONTENT, PADDED, diagonal, CAPPED,
            )  # fmt: skip
            higher = tl.maximum(top, tl.max(s, 1))
            # a row that has seen nothing yet has top -inf, and -inf - -inf is NaN
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + dot(round_to(p, v_block.dtype), v_block)
            top = higher
    empty = top == float("-inf")  # a row without keys: its output is 0, and its weights in the backward pass are 0
    total = tl.where(empty, 1.0, total)
    mean, offset = acc / total[:, None], batch * q_b + head * q_h
    store(out + offset, start, rows, q_n, n, mean, WIDTH, BLOCK_D)
    if low is not None:
        error = mean - round_to(mean, out.dtype.element_ty).to(tl.float32)
        store(low + offset, start, rows, q_n, n, error, WIDTH, BLOCK_D)
    lse_row = lse + per_head * n + start
    tl.store(lse_row + rows, tl.where(empty, unseen, top) + tl.log2(total), mask=start + rows < n)


@triton.jit(do_not_specialize=LENGTHS)
def query_gradient(
    q, k, v, out, low, grad, lse, delta, dq, table, at_q, at_k, until, null,
    q_b, q_h, q_n, k_b, k_h, k_n, at_q_b, at_k_b, n, m, window, columns, scale, cap, factor, lengths,
    query_terms, key_terms, query_table, key_table, query_columns, key_columns,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one block of queries, and delta = Σ_j P dP, which the other kernels read. factor: 1/sqrt(D).

    Here delta is Σ_d dO·O, the same apart from the rounding of P and O in half precision. Gradients of learned biases
    add up n² terms dS and with them this error. The dS of a query should sum to 0, so delta is corrected by their sum.
    """
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i = start + rows
    at, at_q_block = query_indices(start, rows, at_q + batch * at_q_b, n, m, BIAS)
    offset = batch * q_b + head * q_h
    q_block = load(q + offset, start, rows, q_n, n, WIDTH, BLOCK_D)
    grad_block = load(grad + offset, start, rows, q_n, n, WIDTH, BLOCK_D)
    mean = load(out + offset, start, rows, q_n, n, WIDTH, BLOCK_D).to(tl.float32)
    if low is not None:
        mean += load(low + offset, start, rows, q_n, n, WIDTH, BLOCK_D).to(tl.float32)
    delta_block = tl.sum(grad_block.to(tl.float32) * mean, 1)
    per_head = batch * tl.num_programs(1) + head
    per_row = per_head * n
    lse_block = tl.load(lse + per_row + i, mask=i < n, other=float("inf"))  # weights of 0 beyond the last query
    block = (q_block, grad_block, lse_block, delta_block)
    key_offset = batch * k_b + head // GROUP * k_h
    keys, values = k + key_offset, v + key_offset
    head_args = (table + head * columns, at_k + batch * at_k_b, until + batch * m, columns, scale, cap)
    content = content_of_head(
        query_terms, key_terms, query_table, key_table, per_head, n, m, query_columns, key_columns
    )  # fmt: skip
    below = (start + m - n + 1) // BLOCK_N * BLOCK_N
    last = tl.minimum(start + BLOCK_M + m - n, m)
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    excess = tl.zeros([BLOCK_M], dtype=tl.float32)
    if null is not None:  # the dS of this key, whose value is 0
        excess -= tl.exp2(tl.load(null + head) - lse_block) * delta_block
    far = 0
    if window is not None:
        far = tl.maximum(start + m - n - window + 1, 0) // BLOCK_N * BLOCK_N
    for diagonal in tl.static_range(2):
        for begin in range(below if diagonal else far, last if diagonal else below, BLOCK_N):
            gap = start + m - n - begin
            ds, product_grad, k_block = score_gradients(
                block, gap, at, at_q_block, begin, cols, keys, values, k_n, m, head_args, content,
                WIDTH, BLOCK_D, BIAS, CONTENT, PADDED, diagonal, CAPPED,
            )  # fmt: skip
            total += dot(round_to(product_grad, k_block.dtype), k_block)
            excess += tl.sum(ds, 1)
    tl.store(delta + per_row + i, delta_block + excess, mask=i < n)
    store(dq + offset, start, rows, q_n, n, total * factor, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=LENGTHS)
def key_gradient(
    q, k, v, grad, lse, delta, dk, dv, key_sums, table, at_q, at_k, until,
    q_b, q_h, q_n, k_b, k_h, k_n, at_q_b, at_k_b, n, m, window, columns, scale, cap, factor, lengths,
    query_terms, key_terms, query_table, key_table, query_columns, key_columns,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr,
    CAPPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one block of keys, in a loop over the blocks of queries that see it. factor: 1/sqrt(D).

    The outer loop has the query heads of the key head. Of the two inner ones, the first has the blocks of queries on
    the diagonal, the second one those below it.
    """
    start = tl.program_id(0) * BLOCK_N
    key_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offset = batch * k_b + key_head * k_h
    k_block = load(k + offset, start, cols, k_n, m, WIDTH, BLOCK_D)
    v_block = load(v + offset, start, cols, k_n, m, WIDTH, BLOCK_D)
    at_q_row = at_q + batch * at_q_b
    first = tl.maximum(start - (m - n), 0) // BLOCK_M * BLOCK_M
    # from this block of queries on, all of them see all of the keys
    below = tl.cdiv(tl.maximum(start + BLOCK_N - 1 - (m - n), 0), BLOCK_M) * BLOCK_M
    end = n
    if window is not None:  # after the last query that sees one of the keys
        end = tl.minimum(n, start + BLOCK_N - 1 - (m - n) + window)
    dk_block = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv_block = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        queries, grads = q + batch * q_b + head * q_h, grad + batch * q_b + head * q_h
        per_head = batch * tl.num_programs(1) * GROUP + head
        per_row = per_head * n
        head_args = (table + head * columns, at_k + batch * at_k_b, until + batch * m, columns, scale, cap)
        content = content_of_head(
            query_terms, key_terms, query_table, key_table, per_head, n, m, query_columns, key_columns
        )  # fmt: skip
        key_total = tl.zeros([BLOCK_N], dtype=tl.float32)
        for diagonal in tl.static_range(1, -1, -1):
            for begin in range(first if diagonal else below, tl.minimum(below, end) if diagonal else end, BLOCK_M):
                at, at_q_block = query_indices(begin, rows, at_q_row, n, m, BIAS)
                q_block, grad_block, lse_block, delta_block = load_query_rows(
                    queries, grads, lse + per_row, delta + per_row, begin, rows, q_n, n, WIDTH, BLOCK_D
                )
                # tiles are transposed, keys by queries: so K and V, the left factors, are spread over the warps, not
                # copied
                product, gap, j = dot(k_block, tl.trans(q_block)), begin + m - n - start, start + cols
                s, slope = logits(
                    product, gap, at[None, :], j[:, None], at_q_block[None, :], m, head_args, content,
                    BIAS, CONTENT, PADDED, diagonal, CAPPED,
                )  # fmt: skip
                p = tl.exp2(s - lse_block[None, :])
                ds = p * (dot(v_block, tl.trans(grad_block)) - delta_block[None, :])
                if key_sums is not None:
                    key_total += tl.sum(ds, 1)
                if CAPPED:
                    ds *= slope
                dv_block += dot(round_to(p, grad_block.dtype), grad_block)
                dk_block += dot(round_to(ds, q_block.dtype), q_block)
        if key_sums is not None:
            tl.store(key_sums + per_head * m + start + cols, key_total, mask=start + cols < m)
    store(dk + offset, start, cols, k_n, m, dk_block * factor, WIDTH, BLOCK_D)
    store(dv + offset, start, cols, k_n, m, dv_block, WIDTH, BLOCK_D)
