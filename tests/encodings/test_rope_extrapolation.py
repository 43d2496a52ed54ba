"""Readings of a rope model beyond its length, against distances and caches typed from their papers, pair by pair."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from numeric import exact, softmax
from refusal import refused

from fairseq_rpe import attend, build
from fairseq_rpe.core import parse
from fairseq_rpe.encodings.rope_extrapolation import check_trained_rotation

H, D = 2, 8
BASE = 10000.0


# ρ(i, j) of each paper; None: not seen
def self_extend(i, j, *, group, window):
    d = i - j
    return d if d < window else (i // group + window - window // group) - j // group


def rerope(i, j, *, window):
    return min(i - j, window)


def leaky_rerope(i, j, *, window, k):
    d = i - j
    return d if d < window else window + (d - window) / k


def lm_infinite(i, j, *, sinks, window, max_distance):
    d = i - j
    return min(d, max_distance) if j < sinks or d < window else None


def dual_chunk(i, j, *, chunk, max_position):
    between = i // chunk - j // chunk
    p = i % chunk if between == 0 else min(i % chunk + chunk, max_position) if between == 1 else max_position
    return p - j % chunk


def streaming_llm(i, j, *, sinks, recent):
    """By a cache that grows and evicts before each new token, as the paper's: positions are places in it."""
    cache: list[int] = []
    for new in range(i + 1):
        if len(cache) + 1 > sinks + recent:
            cache = cache[:sinks] + cache[len(cache) - (recent - 1) :] if recent > 1 else cache[:sinks]
        cache.append(new)
    return len(cache) - 1 - cache.index(j) if j in cache else None


def string(i, j, *, shift, window):
    d = i - j
    return d if d < shift else d - shift + window


RHO = (self_extend, rerope, leaky_rerope, lm_infinite, streaming_llm, dual_chunk, string)
RHO = {rho.__name__: rho for rho in RHO}
CASES = (
    *("self_extend:group=3,window=6", "self_extend:group=1,window=4", "rerope:window=5"),
    *("leaky_rerope:window=4,k=2.5", "lm_infinite:sinks=2,window=6,max_distance=6"),
    *("lm_infinite:sinks=3,window=8,max_distance=5", "lm_infinite:sinks=3,window=5,max_distance=9"),
    *("streaming_llm:sinks=3,recent=5", "streaming_llm:sinks=0,recent=4", "streaming_llm:sinks=2,recent=1"),
    *("dual_chunk:chunk=6,max_position=9", "dual_chunk:chunk=5,max_position=5"),
    *("string:shift=6,window=2", "string:shift=4,window=4"),
)


def paper(spec: str):
    """ρ of a spec whose options are all numbers of the paper's."""
    name, given = parse(spec)
    return functools.partial(
        RHO[name], **{key: float(value) if "." in value else int(value) for key, value in given.items()}
    )


def distances(spec: str, n: int, length: int | None = None) -> list[list[float | None]]:
    """ρ of every pair as the regions have it; fails where a pair is in two."""
    pos = exact(n)
    found: list[list[float | None]] = [[None] * (i + 1) for i in range(n)]
    for region in build(spec, H, H * D, length).rotation_regions(pos):
        q, k = region.q.expand(1, n)[0].tolist(), region.k.expand(1, n)[0].tolist()
        inside = region.covers(pos.q[..., None], pos.k[:, None])[0]
        for i in range(n):
            for j in range(i + 1):
                if inside[i, j]:
                    assert found[i][j] is None, (spec, i, j)
                    found[i][j] = q[i] - k[j]
    return found


def naive(q, k, v, rho, *, rotary=D, interleaved=False, base=BASE, real=None, factor=lambda i: 1.0):
    """One row (H, n, D) in float64, every pair's key turned by -ρ on its own; ``real``: of tokens, not padding."""
    n, width = q.shape[1:]
    real = np.ones(n, bool) if real is None else real
    at = np.cumsum(real) - 1
    theta = base ** (-2 * np.arange(rotary // 2) / rotary)
    first = np.arange(0, rotary, 2) if interleaved else np.arange(rotary // 2)
    second = first + 1 if interleaved else first + rotary // 2
    out = np.zeros_like(q)
    for h, i in np.ndindex(*q.shape[:2]):
        pairs = [(j, rho(int(at[i]), int(at[j]))) for j in range(i + 1) if real[i] and real[j]]
        seen, scores = [j for j, d in pairs if d is not None], []
        for d in (d for _, d in pairs if d is not None):
            c, s, turned = np.cos(d * theta), np.sin(d * theta), q[h, i].copy()
            turned[first] = q[h, i, first] * c - q[h, i, second] * s
            turned[second] = q[h, i, second] * c + q[h, i, first] * s
            scores.append(factor(int(at[i])) * turned @ k[h, seen[len(scores)]] / math.sqrt(width))
        if seen:
            out[h, i] = softmax(np.array(scores)) @ v[h, seen]
    return out


def qkv(n: int, rows: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    return tuple(torch.randn(3, rows, H, n, D, dtype=torch.float64, generator=generator) * 2)


@pytest.mark.parametrize(
    ("spec", "length", "row", "wanted"),
    [
        (
            "dual_chunk:chunk=11,max_position=12",
            None,
            13,
            [*range(12, 1, -1), 2, 1, 0],
        ),  # as its code has it for 16 tokens
        # what is left out follows from the training length
        ("self_extend:group=2", 16, 9, [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]),
        ("self_extend:group=2,original_length=16", 99, 7, [5, 5, 4, 4, 3, 2, 1, 0]),
        ("rerope", 24, 7, [3, 3, 3, 3, 3, 2, 1, 0]),
        ("lm_infinite:sinks=2", 4, 9, [4, 4, None, None, None, None, 3, 2, 1, 0]),
        ("streaming_llm", 8, 9, [7, 6, 5, 4, None, None, 3, 2, 1, 0]),
        ("string:shift=6,window=2", None, 5, [5, 4, 3, 2, 1, 0]),
        ("string:shift=6,window=2", None, 7, [3, 2, 5, 4, 3, 2, 1, 0]),
        ("string:shift=6,window=2", None, 9, [5, 4, 3, 2, 5, 4, 3, 2, 1, 0]),
        ("string", 18, 9, [4, 3, 2, 1, 5, 4, 3, 2, 1, 0]),
        ("dual_chunk", 12, 20, [11, 10, 9, 8, 7, 6, 5, 4, 3, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_golden_distances(spec, length, row, wanted):
    assert distances(spec, row + 1, length)[row] == wanted


@pytest.mark.parametrize("spec", CASES)
@pytest.mark.parametrize("n", [1, 7, 29])
def test_attention_turns_every_pair_by_its_distance(spec, n):
    q, k, v = qkv(n)
    wanted = naive(*(x[0].numpy() for x in (q, k, v)), paper(spec))
    for backend, rows in itertools.product(("reference", "auto"), (n, 1)):
        found = attend(q[:, :, -rows:], k, v, build(spec, H, H * D), positions=exact(rows, n), backend=backend)
        np.testing.assert_allclose(found[0].numpy(), wanted[:, -rows:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("spec", list(CASES)[::2])
def test_padded_rows_have_the_distances_of_their_tokens(spec):
    """Padding on the left, on the right and none; positions are counted by attend, in float32."""
    q, k, v = qkv(23, rows=3)
    padding = torch.zeros(3, 23, dtype=torch.bool)
    padding[0, :6], padding[2, 20:] = True, True
    found = [attend(q, k, v, build(spec, H, H * D), padding=padding, backend=name) for name in ("reference", "auto")]
    for row, real in enumerate(~padding.numpy()):
        wanted = naive(*(x[row].numpy() for x in (q, k, v)), paper(spec), real=real)
        for one in found:
            np.testing.assert_allclose(one[row].numpy()[:, real], wanted[:, real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["rerope:window=5", "rerope:window=4", "self_extend:group=2,window=4"])
def test_options_of_rope_and_queries_that_grow(spec):
    if spec == "rerope:window=5":
        options, more = (
            "rotary_fraction=0.5,interleaved=true,base=500",
            {"rotary": 4, "interleaved": True, "base": 500.0},
        )
    else:
        options, more = "logn=true,original_length=6", {"factor": lambda i: max(1.0, math.log(i + 1) / math.log(6))}
    q, k, v = qkv(19)
    wanted = naive(*(x[0].numpy() for x in (q, k, v)), paper(spec), **more)
    found = attend(q, k, v, build(f"{spec},{options}", H, H * D), positions=exact(19))
    np.testing.assert_allclose(found[0].numpy(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("temperature", "factor"), [("code", 0.1 * math.log(2) + 1), (1.5, 1.5)])
def test_the_temperature_of_string(temperature, factor):
    """It scales queries and keys, so the code's 1.0693147181 scales logits by 1.1434."""
    q, k, v = qkv(19)
    wanted = naive(*(x[0].numpy() for x in (q, k, v)), paper("string:shift=6,window=2"), factor=lambda i: factor**2)
    spec = f"string:shift=6,window=2,temperature={temperature}"
    for backend in ("reference", "auto"):
        found = attend(q, k, v, build(spec, H, H * D), positions=exact(19), backend=backend)
        np.testing.assert_allclose(found[0].numpy(), wanted, rtol=0, atol=1e-9)
    half = build(f"{spec},rotary_fraction=0.5", H, H * D)  # cos and sin alone have the factor
    assert torch.equal(half.rotate(q, exact(19).q, exact(19))[..., 4:], q[..., 4:])


WITHIN = ["self_extend:group=4", "rerope", "leaky_rerope", "lm_infinite", "streaming_llm", "string"]


@pytest.mark.parametrize("name", WITHIN)
def test_within_the_near_window_it_is_rope(name):
    """Also the interleaved pairs and the fraction of a head are rope's."""
    options = "interleaved=true,rotary_fraction=0.5,base=300"
    encoding = build(f"{name}{':' if ':' not in name else ','}{options}", H, H * D, 80)
    q, k, v = qkv(8)
    rope = build(f"rope:{options}", H, H * D)
    torch.testing.assert_close(attend(q, k, v, encoding), attend(q, k, v, rope), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "trained", "words"),
    [
        ("self_extend:group=2", "rope", ""),
        ("self_extend:group=2", "rope:original_length=64", ""),
        ("self_extend:group=2", "rerope:window=9", ""),
        ("rerope:base=500000", "rope:base=500000", ""),
        ("rerope", "alibi", "'rerope' reads models that were trained with rope, and this one was with 'alibi'"),
        ("rerope", "rope:base=500000", "give base=500000"),
        ("dual_chunk", "rope:interleaved=true", "give interleaved=true"),
        ("rerope", "rope:scaling=linear,factor=4", "needs plain rope"),
    ],
)
def test_a_model_of_another_rotation_is_refused(spec, trained, words):
    with refused(words) if words else contextlib.nullcontext():
        check_trained_rotation(spec, trained)
