"""What Triton kernels of attention share: tiles of q, k and v, of logits with their bias, and of gradients.

Logits are in base 2 (``exp2`` is the hardware's exponential), so biases arrive multiplied by log2(e). Rows are
addressed in int64: 65,536 rows of a large batch do not fit into 32 bits. Products are accumulated in float32.

BIAS says what ``table``, ``at_q`` and ``at_k`` hold, of a head and a sequence:

- NONE: nothing;
- DISTANCE: table[at - j], ``TABLE_MARGIN`` more columns than keys, so that only blocks on the diagonal need bounds;
- POSITIONS: table[at_q[i] - at_k[j]], clamped to the table's ends;
- CURVE + s: table (2^s, 4) with the end, middle, value and slope of each piece of a ``core.Curve``, the last end at
  infinity; float32 at_q is ``near``, at_k is ``far`` with ``TABLE_MARGIN`` more entries. One compilation serves any
  number of pieces up to 2^s.
"""

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TABLE_MARGIN = 256  # at least twice the largest block
LENGTHS = ("n", "m", "columns", "lengths")  # one compilation serves all of them, odd or even
NONE, DISTANCE, POSITIONS, CURVE = (tl.constexpr(x) for x in range(4))
IN_INTERPRETER = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x in dtype, rounded to nearest, ties to even."""
    if IN_INTERPRETER and dtype == tl.bfloat16:  # the interpreter cuts off the bits that hardware rounds
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b):
    """a b with float32 sums; float32 factors as three TF32 products, which keeps float32's precision."""
    if IN_INTERPRETER:  # which multiplies the bit patterns of bfloat16; float32 holds the same rounded values
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def load(base, rows, stride, count, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D): rows of a (count, WIDTH) matrix; zeros outside, so that padding adds nothing to a product."""
    d = tl.arange(0, BLOCK_D)
    mask = ((rows >= 0) & (rows < count))[:, None] & (d < WIDTH)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store(base, rows, stride, count, values, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = (rows < count)[:, None] & (d < WIDTH)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * stride + d[None, :], rounded(values, base.dtype.element_ty), mask=mask)


@triton.jit
def queries_of(first, at_q, n, m, BIAS: tl.constexpr, SIZE: tl.constexpr):
    """Of SIZE queries from ``first`` on: their index, the absolute one, and what their biases are read by."""
    i = first + tl.arange(0, SIZE)
    at = i + (m - n)
    row = at
    if BIAS >= POSITIONS:
        row = tl.load(at_q + i, mask=i < n, other=0)
    return i, at, row


@triton.jit
def on_curve(at, j, near, far, table, visible, STEPS: tl.constexpr, DIAGONAL: tl.constexpr):
    """Where pairs are on a curve, tiles: piece (times 4), x - middle, slope, and the bias itself."""
    entry = (far + at.to(tl.int64)) - j.to(tl.int64)
    if DIAGONAL:
        x = tl.load(entry, mask=visible, other=0.0) * near
    else:
        x = tl.load(entry) * near
    piece = tl.zeros_like(x).to(tl.int32)
    for step in tl.static_range(STEPS - 1, -1, -1):  # a binary search for the first end beyond x
        half = 4 << step
        piece += tl.where(tl.load(table + piece + (half - 4)) <= x, half, 0)
    place = x - tl.load(table + piece + 1)
    slope = tl.load(table + piece + 3)
    return piece, place, slope, tl.load(table + piece + 2) + slope * place


@triton.jit
def logits(product, at, j, at_q, m, terms, BIAS: tl.constexpr, PADDED: tl.constexpr, DIAGONAL: tl.constexpr):
    """Logits from products q·k, -inf where hidden. at, at_q: (BLOCK_M, 1), j: (1, BLOCK_N), or both transposed.

    terms: table, at_k and padding of the head and the sequence, columns, scale. Without DIAGONAL every j is known to be
    a key that every query of the block sees.
    """
    table, at_k, padding, columns, scale = terms
    s = product * scale
    visible = (j <= at) & (j >= 0)
    if BIAS == DISTANCE:
        # 64-bit sums of a row and a column let the compiler address neighbours by constants, from one register
        entry = (table + at.to(tl.int64)) - j.to(tl.int64)
        # always true: loads inside a branch are not staged through shared memory, where these would take most of it
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
            _, _, _, bias = on_curve(at, j, at_q, at_k, table, visible, BIAS - CURVE, DIAGONAL)
            s += bias
    if PADDED:
        visible = visible & (tl.load(padding + j, mask=(j >= 0) & (j < m), other=1) == 0)
    if DIAGONAL or PADDED:
        s = tl.where(visible, s, float("-inf"))
    return s


@triton.jit
def query_rows(q, grad, lse, delta, i, q_n, n, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of queries i: tiles of q and dO, and their log-sum-exp and delta, which make weights of 0 beyond the last."""
    q_block = load(q, i, q_n, n, WIDTH, BLOCK_D)
    grad_block = load(grad, i, q_n, n, WIDTH, BLOCK_D)
    lse_block = tl.load(lse + i, mask=i < n, other=float("inf"))
    return q_block, grad_block, lse_block, tl.load(delta + i, mask=i < n, other=0.0)


@triton.jit
def query_gradients(
    queries, at, at_q, j, keys, values, k_n, m, terms,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr, PADDED: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """dS of a tile of queries by keys j, in nats, and the tile of k. queries: of :func:`query_rows`.

    dS = P (dP - delta) with the weights P and dP = dO·Vᵀ.
    """
    q, grad, lse, delta = queries
    k = load(keys, j, k_n, m, WIDTH, BLOCK_D)
    v = load(values, j, k_n, m, WIDTH, BLOCK_D)
    s = logits(dot(q, tl.trans(k)), at[:, None], j[None, :], at_q[:, None], m, terms, BIAS, PADDED, DIAGONAL)
    return tl.exp2(s - lse[:, None]) * (dot(grad, tl.trans(v)) - delta[:, None]), k
