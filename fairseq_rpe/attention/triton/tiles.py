"""Functions shared by the Triton kernels of attention: tiles of q, k and v, of logits with their bias, of gradients.

Logits are in base 2 (``exp2`` is the hardware's exponential), so biases arrive multiplied by log2(e). Tiles begin at
64-bit addresses, since 65,536 rows of a large batch do not fit into 32 bits; offsets within a tile have 32 bits, which
take fewer registers. Products are accumulated in float32.

BIAS determines the content of ``table``, ``at_q`` and ``at_k``, of a head and a sequence:

- NONE: nothing;
- DISTANCE: table[at - j], ``TABLE_MARGIN`` more columns than keys, so that only blocks on the diagonal need bounds;
- POSITIONS: table[at_q[i] - at_k[j]], clamped to the table's ends;
- CURVE + s: table (2^s, 4) with the end, midpoint, value and slope of each piece of a ``ScaledDistanceBias``, the last
  end at infinity; float32 at_q is its ``query_scale`` (near), at_k its ``distance_values`` (far) with ``TABLE_MARGIN``
  more entries. One compilation serves any number of pieces up to 2^s.

CONTENT determines the terms that depend on the tokens, which are added to that bias. It is a sum of these flags:

- TOKENS: query_terms[i] + key_terms[j], where query_terms (B, H, 2, n) and key_terms (B, H, 2, m) contain float32
  numbers in base 2 and then their rounding errors, so that a small sum of two large numbers is precise;
- BY_QUERY: query_table[i, min(at - j, query_columns - 1)] of float32 (B, H, n, query_columns), in nats;
- BY_KEY: key_table[j, min(at - j, key_columns - 1)] of float32 (B, H, m, key_columns), in nats.

These arguments have the same meaning in all kernels:

- q, grad, out, dq: (B, H, n, D) in one memory layout; q_b, q_h, q_n: elements to the next sequence, head and query;
- k, v, dk, dv: (B, H / GROUP, m, D) in one memory layout; k_b, k_h, k_n: likewise;
- lse, delta: (B, H, n) float32, the log-sum-exp in base 2 and Σ_j P·dP;
- at_q_b, at_k_b: elements from a sequence's at_q and at_k to the next one's, 0 if all sequences share them;
- until: (B, m) int32, the last query that sees each key, -1 at padding; read if PADDED;
- null: (H,) float32 logits in base 2 of a key with value 0 that every query sees besides, or None;
- window: no query sees a key that is this number of tokens or more before it, or None. The bias hides such keys, so a
  window decides only where loops begin and end;
- cap: c of c·tanh(s/c), in base 2, which replaces the products s = q·k·scale if CAPPED;
- GROUP: number of query heads that share a key head; query head h reads key head h // GROUP;
- columns: length of a head's table, at least 1;
- scale: log2(e) / sqrt(D);
- gap: absolute index of a tile's first query less that of its first key;
- DIAGONAL: whether causality may hide some key of a tile from some query; otherwise only ``until`` hides keys.
"""

import math
import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TABLE_MARGIN = 256  # at least twice the largest block
MOST_APART = 2**23  # elements from a row to the next one: a tile of 128 rows then has addresses within 32 bits
# arguments for whose values, odd or even, one compilation serves; the last one only the autotuner reads, and kernels of
# a bias's gradient have neither this one nor a window
LENGTHS = ("n", "m", "columns", "query_columns", "key_columns", "window", "lengths")
LOG2E = tl.constexpr(math.log2(math.e))
FEW_STEPS = tl.constexpr(5)  # steps of a binary search up to which a tile loops over its pieces instead
# entries of a piece in the table of a curve; the first is its end
MIDPOINT, VALUE, SLOPE_ENTRY, ENTRIES = (tl.constexpr(x) for x in range(1, 5))
NONE, DISTANCE, POSITIONS, CURVE = (tl.constexpr(x) for x in range(4))
TOKENS, BY_QUERY, BY_KEY = (tl.constexpr(x) for x in (1, 2, 4))
IN_INTERPRETER = tl.constexpr(INTERPRETED)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Return float32 x in dtype, rounded to nearest, ties to even."""
    if IN_INTERPRETER and dtype == tl.bfloat16:  # the interpreter truncates where hardware rounds
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b):
    """Return a b with float32 sums; float32 factors as three TF32 products, which preserve float32's precision."""
    if IN_INTERPRETER:  # which multiplies the bit patterns of bfloat16; float32 holds the same rounded values
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def load(base, start, rows, stride, count, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, INSIDE: tl.constexpr = False):
    """Load rows start + rows of a (count, WIDTH) matrix as (rows, BLOCK_D); zeros outside, which add nothing.

    INSIDE: every row is one of the matrix.
    """
    d = tl.arange(0, BLOCK_D)
    address = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + d[None, :])
    if INSIDE and WIDTH == BLOCK_D:
        tile = tl.load(address)
    elif INSIDE:
        tile = tl.load(address, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        i = start + rows
        tile = tl.load(address, mask=((i >= 0) & (i < count))[:, None] & (d < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def store(base, start, rows, stride, count, values, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store values (rows, BLOCK_D) as rows start + rows of a (count, WIDTH) matrix, rounded to its dtype."""
    d = tl.arange(0, BLOCK_D)
    address = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + d[None, :])
    mask = (start + rows < count)[:, None] & (d < WIDTH)[None, :]
    tl.store(address, round_to(values, base.dtype.element_ty), mask=mask)


@triton.jit
def query_indices(start, rows, at_q, n, m, BIAS: tl.constexpr):
    """Return the absolute indices of queries start + rows, and their at_q; beyond the last query its at_q repeats."""
    at = start + (m - n) + rows
    at_q_block = at
    if BIAS >= POSITIONS:
        at_q_block = tl.load(at_q + tl.minimum(start + rows, n - 1))
    return at, at_q_block


@triton.jit
def curve_bias(
    gap, at, j, near, far, m, table, columns, visible,
    STEPS: tl.constexpr, DIAGONAL: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Return far and x = far·near of a tile's pairs, the offsets of their first and last piece, and bias or slope.

    The offset of a piece is the index of its end in the table, 4 times its number. far never decreases, so the least
    and the largest distance of the tile determine the first and the last piece. If a table has few pieces, a loop over
    the tile's pieces needs no look-up and no address for each pair. Among many pieces, each pair is searched.

    gap, at, j: as in :func:`logits`. STEPS: steps of a binary search. SLOPE: whether to return the slope.
    """
    # 64-bit sums of a row and a column let the compiler address neighbours by constants, from one register
    entry = (far + at.to(tl.int64)) - j.to(tl.int64)
    if DIAGONAL:
        far_value = tl.load(entry, mask=visible, other=0.0)
    else:
        far_value = tl.load(entry)
    x = far_value * near
    least = tl.load(far + tl.minimum(tl.maximum(gap - j.shape[0] * j.shape[1] + 1, 0), m - 1)) * tl.min(near)
    most = tl.load(far + tl.minimum(tl.maximum(gap + at.shape[0] * at.shape[1] - 1, 0), m - 1)) * tl.max(near)
    first, last = 0, 0
    for step in tl.static_range(STEPS - 1, -1, -1):  # binary searches for the first end beyond each
        half = ENTRIES << step
        first += tl.where(tl.load(table + first + (half - ENTRIES)) <= least, half, 0)
        last += tl.where(tl.load(table + last + (half - ENTRIES)) <= most, half, 0)
    line_or_slope = tl.load(table + first + SLOPE_ENTRY)
    if SLOPE:
        line_or_slope = tl.where(x == x, line_or_slope, x)  # NaN is in no piece, so it propagates
    else:
        line_or_slope = tl.load(table + first + VALUE) + line_or_slope * (x - tl.load(table + first + MIDPOINT))
    if last > first:  # a loop outside of a branch would keep the loop around it from being pipelined
        if STEPS <= FEW_STEPS:
            for p in range(first + ENTRIES, last + ENTRIES, ENTRIES):
                line = tl.load(table + p + SLOPE_ENTRY)
                if not SLOPE:
                    line = tl.load(table + p + VALUE) + line * (x - tl.load(table + p + MIDPOINT))
                # a piece begins at the end of the one before
                line_or_slope = tl.where(x >= tl.load(table + p - ENTRIES), line, line_or_slope)
        else:
            piece, half = tl.zeros_like(x).to(tl.int32), columns
            for _ in range(0, STEPS):
                half = half // 2
                piece += tl.where(tl.load(table + piece + (half - ENTRIES)) <= x, half, 0)
            line_or_slope = tl.load(table + piece + SLOPE_ENTRY)
            if not SLOPE:
                line_or_slope = tl.load(table + piece + VALUE) + line_or_slope * (x - tl.load(table + piece + MIDPOINT))
    return far_value, x, first, last, line_or_slope


@triton.jit
def soft_cap(s, cap):
    """Return cap·tanh(s/cap) and its derivative."""
    e = tl.exp2(tl.abs(s) * (-2.0 * LOG2E) / cap)  # exp(-2·|s|/cap)
    t = (1.0 - e) / (1.0 + e)
    return tl.where(s < 0, -t, t) * cap, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def content_of_head(query_terms, key_terms, query_table, key_table, per_head, n, m, query_columns, key_columns):
    """Return the arguments of :func:`content_bias` for one head of one sequence; per_head: its index among all."""
    terms = query_terms + per_head * (2 * n), key_terms + per_head * (2 * m)
    tables = query_table + per_head * n * query_columns, key_table + per_head * m * key_columns
    return terms[0], terms[1], tables[0], tables[1], n, query_columns, key_columns


@triton.jit
def content_bias(at, j, m, content, CONTENT: tl.constexpr):
    """Return the terms of a tile that depend on the tokens, in base 2; at, j and m as in :func:`logits`.

    Indices outside of the sequence read another token's numbers, which are finite if all numbers are.
    """
    query_terms, key_terms, query_table, key_table, n, query_columns, key_columns = content
    i, key, distance = tl.minimum(at - (m - n), n - 1), tl.minimum(tl.maximum(j, 0), m - 1), tl.maximum(at - j, 0)
    bias = 0.0
    if TOKENS & CONTENT:
        # nearly opposite numbers have an exact sum, to which their rounding errors are added
        bias += tl.load(query_terms + i) + tl.load(key_terms + key)
        bias += tl.load(query_terms + n + i) + tl.load(key_terms + m + key)
    if BY_QUERY & CONTENT:
        bias += tl.load(query_table + i * query_columns + tl.minimum(distance, query_columns - 1)) * LOG2E
    if BY_KEY & CONTENT:
        bias += tl.load(key_table + key * key_columns + tl.minimum(distance, key_columns - 1)) * LOG2E
    return bias


@triton.jit
def logits(
    product, gap, at, j, at_q, m, head_args, content,
    BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, DIAGONAL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return the logits of a tile from its products q·k, and their derivative by q·k·scale, which is 1 unless CAPPED.

    A logit is -inf where a query does not see a key.

    product: (BLOCK_M, BLOCK_N) q·k, or transposed, keys by queries. at: (BLOCK_M, 1) absolute indices of the queries,
    and at_q likewise; j: (1, BLOCK_N) indices of the keys; or both transposed. gap: the first ``at`` less the first
    ``j``. head_args: table, at_k and until of this head and sequence, columns, scale, cap. content: the result of
    :func:`content_of_head`.
    """
    table, at_k, until, columns, scale, cap = head_args
    s = product * scale
    slope = 1.0
    if CAPPED:
        s, slope = soft_cap(s, cap)
    visible = None
    if DIAGONAL or PADDED:
        # apart, at and j take a register each; a difference would take one for every pair, kept from tile to tile
        visible = (j <= at) & (j >= 0)
    # columns > 0 is always true: loads inside a branch are not staged through shared memory, which they would fill
    if BIAS == DISTANCE:
        entry = (table + at.to(tl.int64)) - j.to(tl.int64)
        if columns > 0:
            if DIAGONAL:
                s += tl.load(entry, mask=visible, other=0.0)
            else:
                s += tl.load(entry)
    if BIAS == POSITIONS:
        column = at_q - tl.load(at_k + j, mask=(j >= 0) & (j < m), other=0)
        s += tl.load(table + tl.minimum(tl.maximum(column, 0), columns - 1))
    if BIAS >= CURVE:
        if columns > 0:
            _, _, _, _, bias = curve_bias(
                gap, at, j, at_q, at_k, m, table, columns, visible, BIAS - CURVE, DIAGONAL, False
            )  # fmt: skip
            s += bias
    if CONTENT:
        if columns > 0:
            s += content_bias(at, j, m, content, CONTENT)
    if PADDED:
        visible = visible & (tl.load(until + j, mask=(j >= 0) & (j < m), other=-1) >= at)
    if DIAGONAL or PADDED:
        s = tl.where(visible, s, float("-inf"))
    return s, slope


@triton.jit
def load_query_rows(q, grad, lse, delta, start, rows, q_n, n, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load q, dO, log-sum-exp and delta of queries start + rows; beyond the last query all weights become 0."""
    i = start + rows
    q_block = load(q, start, rows, q_n, n, WIDTH, BLOCK_D)
    grad_block = load(grad, start, rows, q_n, n, WIDTH, BLOCK_D)
    lse_block = tl.load(lse + i, mask=i < n, other=float("inf"))
    return q_block, grad_block, lse_block, tl.load(delta + i, mask=i < n, other=0.0)


@triton.jit
def score_gradients(
    queries, gap, at, at_q, start, cols, keys, values, k_n, m, head_args, content,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BIAS: tl.constexpr, CONTENT: tl.constexpr, PADDED: tl.constexpr, DIAGONAL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return dS = P (dP - delta) of a tile of queries by keys start + cols, in nats, and the tile of k.

    The second result is the gradient of q·k·scale: that of the logits dS, unless CAPPED. P are the weights, and
    dP = dO·Vᵀ. queries: the result of :func:`load_query_rows`.
    """
    q, grad, lse, delta = queries
    k = load(keys, start, cols, k_n, m, WIDTH, BLOCK_D, not DIAGONAL)
    v = load(values, start, cols, k_n, m, WIDTH, BLOCK_D, not DIAGONAL)
    product, j = dot(q, tl.trans(k)), start + cols
    s, slope = logits(
        product, gap, at[:, None], j[None, :], at_q[:, None], m, head_args, content,
        BIAS, CONTENT, PADDED, DIAGONAL, CAPPED,
    )  # fmt: skip
    ds = tl.exp2(s - lse[:, None]) * (dot(grad, tl.trans(v)) - delta[:, None])
    product_grad = ds
    if CAPPED:
        product_grad = ds * slope
    return ds, product_grad, k
