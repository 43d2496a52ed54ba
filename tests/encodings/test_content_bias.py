"""Encodings that depend on the tokens: scores typed from the papers' equations in numpy, pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numeric import exact, lively, softmax, vectors
from refusal import refused

from fairseq_rpe.analysis.convergence import CONVERGES, DEPENDS, verdict
from fairseq_rpe.attention.backends import BACKENDS
from fairseq_rpe.attention.forward import build_plan, compute_token_features, run_attention
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.window import Window

SHAPES = [(1, 1, 4), (5, 2, 4), (9, 3, 6), (16, 4, 2), (23, 2, 8)]  # tokens, heads, head width


def huang(q, k, x, p, i, j, h, spec):
    a, content = p["table"][min(i - j, 3)], q[h, i] * k[h, j]
    if "method" in spec:  # 1: a number, 3: a vector
        return (content * a).sum() / math.sqrt(q.shape[2])
    return (content.sum() + q[h, i] @ a + k[h, j] @ a) / math.sqrt(q.shape[2])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def shaw(q, k, x, p, i, j, h, spec):
    return q[h, i] @ (k[h, j] + p["keys"][min(i - j, 3)]) / math.sqrt(q.shape[2])


def music(q, k, x, p, i, j, h, spec):
    e = p["vectors"][h]
    far = np.zeros(q.shape[2]) if "out_of_range" not in spec else e[-1]
    return (q[h, i] @ k[h, j] + q[h, i] @ (e[i - j] if i - j < len(e) else far)) / math.sqrt(q.shape[2])


def transformer_xl(q, k, x, p, i, j, h, spec):
    heads, _, width = q.shape
    d = min(i - j, 4) if "max_distance" in spec else i - j
    c = np.arange(heads * width // 2)
    angles = d * 10000.0 ** (-2 * c / (heads * width))
    r = (p["project.weight"] @ np.concatenate([np.sin(angles), np.cos(angles)])).reshape(heads, width)
    u, v = p["u"][h], p["v"][h]
    return ((q[h, i] + u) @ k[h, j] + (q[h, i] + v) @ r[h]) / math.sqrt(width)


def log_bucket(d, buckets, most):
    middle = buckets // 2
    if d <= middle:
        return d
    return math.ceil(math.log(d / middle) / math.log((most - 1) / middle) * (middle - 1)) + middle


def deberta(q, k, x, p, i, j, h, spec):
    heads, _, width = q.shape
    buckets, span = "buckets" in spec, 6 if "buckets" in spec else 4

    def row(a, b):
        d = a - b
        d = math.copysign(log_bucket(abs(d), 6, 12), d) if buckets else d
        return int(min(max(d + span, 0), 2 * span - 1))

    table = p["table"]
    keys = (table @ p["to_key.weight"].T).reshape(-1, heads, width)
    queries = (table @ p["to_query.weight"].T + p["to_query.bias"]).reshape(-1, heads, width)
    third = row(j, i) if "paper" in spec else row(i, j)
    total = q[h, i] @ k[h, j] + q[h, i] @ keys[row(i, j), h] + k[h, j] @ queries[third, h]
    return total / math.sqrt(3 * width)


def cope(q, k, x, p, i, j, h, spec):
    width = q.shape[2]
    at = min(sum(sigmoid(q[h, i] @ k[h, m] / math.sqrt(width)) for m in range(j, i + 1)), 2.0)
    read = q[h, i] @ p["vectors"]
    w = at - math.floor(at)
    position = (1 - w) * read[math.floor(at)] + w * read[math.ceil(at)]
    content = q[h, i] @ k[h, j]
    if "content" in spec:
        return content / math.sqrt(width) + position
    return (content + position) / math.sqrt(width)


def dape(q, k, x, p, i, j, h, spec):
    heads, _, width = q.shape
    s = np.array([q[g, i] @ k[g, j] for g in range(heads)]) / math.sqrt(width)
    b = -np.array(alibi_slopes(heads)) * (i - j)
    hidden = p["mix.weight"] @ np.concatenate([s, b]) + p["mix.bias"]
    found = p["out.weight"] @ np.where(hidden > 0, hidden, 0.01 * hidden) + p["out.bias"]
    return (s + b + found)[h]


def forgetting(q, k, x, p, i, j, h, spec):
    gates = [math.log(sigmoid(p["project.weight"][h] @ x[t] + p["bias"][h])) for t in range(j + 1, i + 1)]
    return q[h, i] @ k[h, j] / math.sqrt(q.shape[2]) + sum(gates)


def pairwise_forgetting(q, k, x, p, i, j, h, spec):
    heads, width = len(q), len(p["project.weight"]) // (2 * len(q))
    queries, keys = p["project.weight"].reshape(2, heads, width, -1)[:, h]
    gates = [math.log(sigmoid(queries @ x[i] @ (keys @ x[t]) / math.sqrt(width))) for t in range(j, i)]
    return q[h, i] @ k[h, j] / math.sqrt(q.shape[2]) + sum(gates)


def grape_a(q, k, x, p, i, j, h, spec):
    gate = 0.0
    for name, vector in (("u", k[h, j]), ("v", q[h, i])):
        if name in p:
            unit = p[name][h] / (1 if "unit" in spec else np.linalg.norm(p[name][h]))
            gate += np.log1p(np.exp(unit @ vector / math.sqrt(q.shape[2])))
    slope = np.log1p(np.exp(p["raw_slope"][h])) * alibi_slopes(len(q))[h]
    return q[h, i] @ k[h, j] / math.sqrt(q.shape[2]) - slope * gate * (i - j)


CASES = {
    "huang:max_distance=3": huang,
    "huang:method=1,max_distance=3": huang,
    "huang:method=3,max_distance=3": huang,
    "shaw:max_distance=3": shaw,
    "shaw:max_distance=3,values=true": shaw,
    "music:max_distance=6": music,
    "music:max_distance=6,out_of_range=clip": music,
    "transformer_xl": transformer_xl,
    "transformer_xl:max_distance=4": transformer_xl,
    "deberta:max_distance=4": deberta,
    "deberta:max_distance=12,buckets=6": deberta,
    "deberta:max_distance=4,p2c=paper": deberta,
    "cope:max_positions=3": cope,
    "cope:max_positions=3,scale_on=content": cope,
    "dape:base=alibi": dape,
    "forgetting": forgetting,
    "pairwise_forgetting:gate_width=3": pairwise_forgetting,
    "grape_a": grape_a,
    "grape_a:gate=query": grape_a,
    "grape_a:gate=both,unit_vectors=false": grape_a,
}


def attended(encoding, q, k, v, x, backend="reference"):
    plan = build_plan(encoding, exact(q.shape[2]), None, BACKENDS[backend])
    return run_attention(q, k, v, plan, 0.0, compute_token_features(x, plan))


@pytest.mark.parametrize("spec", CASES)
def test_scores_are_the_papers(spec):
    for n, heads, width in SHAPES:
        encoding, (q, k, v) = lively(spec, heads, width), vectors(1, heads, n, width)
        x = vectors(1, n, heads * width, seed=1)[0]
        with torch.no_grad():
            found = [attended(encoding, q, k, v, x, name)[0].numpy() for name in ("reference", "sdpa")]
        p = {name: value.detach().numpy() for name, value in encoding.named_parameters()}
        given = [one[0].numpy() for one in (q, k, x)]
        for h, i in np.ndindex(heads, n):
            weights = softmax(np.array([CASES[spec](*given, p, i, j, h, spec) for j in range(i + 1)]))
            wanted = weights @ v[0, h, : i + 1].numpy()
            if "values" in p:
                wanted = wanted + weights @ p["values"][np.minimum(i - np.arange(i + 1), 3)]
            for got in found:
                assert np.allclose(got[h, i], wanted, rtol=1e-9, atol=1e-9), (n, h, i)


def test_deberta_buckets():
    rows = build("deberta:max_distance=512,buckets=256", 1, 4).rows(torch.device("cpu")) - 256
    for d, bucket in {0: 0, 127: 127, 128: 128, 129: 129, 140: 137, 200: 169, 256: 192, 400: 233, 511: 255}.items():
        assert rows[d] == bucket
    assert rows[-1] == 255


def test_constant_forgetting_is_alibi():
    encoding, alibi = build("forgetting:gate=bias", 4, 32).double(), build("alibi", 4, 32)
    with torch.no_grad():
        encoding.bias.copy_(-(-alibi.bias_profile(2)[:, 1]).expm1().log())
        assert_same(encoding, alibi)
    start = build("forgetting:gate=fixed", 4, 16).bias.tolist()
    assert start == pytest.approx([0.4327521296, 2.2604742221, 3.9179747421, 5.5432236837], rel=1e-6)


@pytest.mark.parametrize("base", ["kerple_log", "fire", "rope", "nope"])
def test_dape_with_a_last_layer_of_zeros_is_its_base(base):
    encoding = build(f"dape:base={base}", 4, 32).double()
    torch.nn.init.zeros_(encoding.out.weight), torch.nn.init.zeros_(encoding.out.bias)
    assert_same(encoding, encoding.base)


def test_dape_adjusts_users_encodings_that_allow_it(monkeypatch):
    allowed = type("Allowed", (Window,), {"dape_base": True})
    for name, cls in (("allowed", allowed), ("not_allowed", Window)):
        monkeypatch.setitem(registry._table, name, cls)
    assert isinstance(build("dape:base=allowed", 4, 32).base, allowed)
    with refused("is one of alibi, allowed, fire, kerple_log, nope, rope, not 'not_allowed'"):
        build("dape:base=not_allowed", 4, 32)


@torch.no_grad()
def assert_same(encoding, other):
    q, k, v = vectors(1, 4, 9, 8)
    a, b = (attended(e, q, k, v, torch.zeros(1, 9, 32).double()) for e in (encoding, other))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["kerple_log", "nope"])
def test_dape_without_gradients_takes_a_few_pairs_at_a_time(base, dtype):
    """Two texts of 10,201 pairs each, no multiple of as many as are taken; some keys are not to be seen."""
    encoding, pos = build(f"dape:base={base}", 4, 32), Positions.arange(101)
    scores = torch.randn(2, 4, 101, 101).to(dtype)
    scores[:, :, torch.ones(101, 101).triu(1).bool()] = -torch.inf
    with_gradients = encoding.transform_scores(scores, scores, pos).detach()
    with torch.no_grad():
        without = encoding.transform_scores(scores, scores, pos)
    within = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(without, with_gradients, rtol=within, atol=within)
    assert torch.isneginf(without[..., 0, 1:]).all() and without.dtype == dtype


@pytest.mark.parametrize(("spec", "decision"), [("forgetting:gate=fixed", CONVERGES), ("forgetting", DEPENDS)])
def test_verdicts(spec, decision):
    assert {head.decision for head in verdict(spec)} == {decision}
