"""Encodings that depend on the tokens: scores typed from the papers' equations in numpy, pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fairseq_rpe.analysis.convergence import verdict
from fairseq_rpe.attention.layer import carry_out, noted, plan_of
from fairseq_rpe.attention.select import BACKENDS
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.encodings import build

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
    far = np.zeros(q.shape[2]) if "beyond" not in spec else e[-1]
    return (q[h, i] @ k[h, j] + q[h, i] @ (e[i - j] if i - j < len(e) else far)) / math.sqrt(q.shape[2])


def transformer_xl(q, k, x, p, i, j, h, spec):
    heads, _, width = q.shape
    d = min(i - j, 4) if "clamp" in spec else i - j
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
    b = np.array([-build("alibi", heads, heads * width).profile(2)[g, 1].abs().item() * (i - j) for g in range(heads)])
    hidden = p["mix.weight"] @ np.concatenate([s, b]) + p["mix.bias"]
    found = p["out.weight"] @ np.where(hidden > 0, hidden, 0.01 * hidden) + p["out.bias"]
    return (s + b + found)[h]


def forgetting(q, k, x, p, i, j, h, spec):
    gates = [math.log(sigmoid(p["project.weight"][h] @ x[t] + p["bias"][h])) for t in range(j + 1, i + 1)]
    return q[h, i] @ k[h, j] / math.sqrt(q.shape[2]) + sum(gates)


CASES = {
    "huang:max_distance=3": huang,
    "huang:method=1,max_distance=3": huang,
    "huang:method=3,max_distance=3": huang,
    "shaw:clip=3": shaw,
    "shaw:clip=3,values=true": shaw,
    "music:max_distance=6": music,
    "music:max_distance=6,beyond=clip": music,
    "transformer_xl": transformer_xl,
    "transformer_xl:clamp=4": transformer_xl,
    "deberta:max_distance=4": deberta,
    "deberta:max_distance=12,buckets=6": deberta,
    "deberta:max_distance=4,p2c=paper": deberta,
    "cope:max_positions=3": cope,
    "cope:max_positions=3,scaled=content": cope,
    "dape:base=alibi": dape,
    "forgetting": forgetting,
}


@torch.no_grad()
def lively(spec, heads, width, length=None):
    """What is learned starts small, or at 0, which would hide it."""
    torch.manual_seed(0)
    encoding = build(spec, heads, heads * width, length).double()
    for parameter in encoding.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return encoding


def attended(encoding, q, k, v, x, backend="reference"):
    pos = Positions.arange(q.shape[2], k.shape[2], dtype=torch.float64)
    plan = plan_of(encoding, pos, None, BACKENDS[backend])
    return carry_out(q, k, v, plan, 0.0, noted(x, plan))


@pytest.mark.parametrize("spec", CASES)
def test_scores_are_the_papers(spec):
    for n, heads, width in SHAPES:
        encoding = lively(spec, heads, width)
        q, k, v = (torch.randn(1, heads, n, width, dtype=torch.float64) for _ in range(3))
        x = torch.randn(1, n, heads * width, dtype=torch.float64)
        with torch.no_grad():
            found = [attended(encoding, q, k, v, x, name)[0].numpy() for name in ("reference", "sdpa")]
        p = {name: value.detach().numpy() for name, value in encoding.named_parameters()}
        nq, nk, nv, nx = q[0].numpy(), k[0].numpy(), v[0].numpy(), x[0].numpy()
        for h in range(heads):
            for i in range(n):
                scores = np.array([CASES[spec](nq, nk, nx, p, i, j, h, spec) for j in range(i + 1)])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                wanted = weights @ nv[h, : i + 1]
                if "values" in p:
                    wanted = wanted + sum(weights[j] * p["values"][min(i - j, 3)] for j in range(i + 1))
                for got in found:
                    assert np.allclose(got[h, i], wanted, rtol=1e-9, atol=1e-9), (n, h, i)


# One head of width 4, five tokens: Q = sin(1 + f), K = cos(1 + f), V = sin((1 + f)/2), f = 4·row + column.
GRID = torch.arange(1, 21, dtype=torch.float64).view(5, 4)
TOY = [x[None, None] for x in (GRID.sin(), GRID.cos(), (GRID / 2).sin())]
PLAIN = [-0.2366045878, -0.2831392232, -0.2603515020, -0.1738206531]


def waves(rows, function=torch.sin):
    return 0.1 * function(1 + torch.arange(4 * rows, dtype=torch.float64).view(rows, 4))


def toy(spec, **parameters):
    """The last row of the output, from parameters by name."""
    encoding = build(spec, 1, 4).double()
    with torch.no_grad():
        known = dict(encoding.named_parameters())
        for name, value in parameters.items():
            known[name.replace("__", ".")].copy_(value)
        return attended(encoding, *TOY, torch.zeros(1, 5, 4, dtype=torch.float64))[0, 0, -1]


def from_logits(*logits):
    """What attention makes of the last row's scores."""
    return torch.tensor(logits, dtype=torch.float64).softmax(0) @ TOY[2][0, 0]


def test_golden_rows():
    """Numbers worked out apart from this project, for the toy input."""
    eye = torch.eye(4, dtype=torch.float64)
    a = waves(5)
    got = toy("shaw:clip=2,values=true", keys=a[:3].flip(0), values=waves(5, torch.cos)[:3].flip(0))
    assert got.tolist() == pytest.approx([-0.1920010528, -0.2984093963, -0.3049266877, -0.1928414924], abs=1e-9)
    wanted = from_logits(-0.5841026053, -0.4001421712, 1.1072033606, -1.0472906561, 0.2619063525)
    torch.testing.assert_close(toy("music:max_distance=5", vectors=a.flip(0)[None]), wanted, rtol=0, atol=1e-9)
    u = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    wanted = from_logits(-0.1747122308, -0.0259479865, 1.3523670191, -0.8655545103, 1.1083032322)
    got = toy("transformer_xl", u=u, v=u.flip(1), project__weight=eye)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)
    wanted = from_logits(-0.4937177072, -0.5261475353, 1.1086236062, -1.0248859893, 0.1052524675)
    e = 0.1 * torch.sin(1 + torch.arange(12, dtype=torch.float64).view(4, 3))
    torch.testing.assert_close(toy("cope:max_positions=3", vectors=e), wanted, rtol=0, atol=1e-9)
    for spec in ("shaw", "music:max_distance=3", "cope", "transformer_xl"):
        encoding = build(spec, 1, 4).double()
        nothing = {name.replace(".", "__"): torch.zeros_like(p) for name, p in encoding.named_parameters()}
        assert toy(spec, **nothing).tolist() == pytest.approx(PLAIN, abs=1e-9)


def test_deberta_and_forgetting_of_the_toy():
    tables = [waves(4), waves(4, torch.cos)]
    for p2c, logits in {
        "paper": (-0.2586887867, -0.3564301934, 0.5992645733, -0.6059436773, 0.0667396047),
        "code": (-0.2604495239, -0.3318099772, 0.5688396160, -0.5372076531, 0.0667396047),
    }.items():
        encoding = build(f"deberta:max_distance=2,p2c={p2c}", 1, 4).double()
        encoding.vectors = lambda project, sign, dtype, e=encoding: tables[project is e.to_query][
            None, e.rows(torch.device("cpu"), sign)
        ]
        with torch.no_grad():
            got = attended(encoding, *TOY, torch.zeros(1, 5, 4, dtype=torch.float64))[0, 0, -1]
        torch.testing.assert_close(got, from_logits(*logits), rtol=0, atol=1e-9)
    encoding = build("forgetting", 1, 4).double()
    gates = torch.tensor([0, 1, -1, 2, 0.5], dtype=torch.float64)
    form = encoding.scores(*TOY[:2], Positions.arange(5), gates.view(1, 1, 5, 1))
    row = (form.query[0, 0, -1] + form.key[0, 0]).tolist()
    assert row == pytest.approx([-2.2275283703, -1.9142666827, -0.6010049952, -0.4740769842, 0], abs=1e-9)
    start = build("forgetting:gate=fixed", 4, 16).bias.tolist()
    assert start == pytest.approx([0.4327521296, 2.2604742221, 3.9179747421, 5.5432236837], rel=1e-6)


def test_deberta_buckets():
    rows = build("deberta:max_distance=512,buckets=256", 1, 4).rows(torch.device("cpu")) - 256
    for d, bucket in {0: 0, 127: 127, 128: 128, 129: 129, 140: 137, 200: 169, 256: 192, 400: 233, 511: 255}.items():
        assert rows[d] == bucket
    assert rows[-1] == 255


def test_constant_forgetting_is_alibi():
    q, k, v = (torch.randn(1, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    encoding, alibi = build("forgetting:gate=bias", 4, 32).double(), build("alibi", 4, 32)
    with torch.no_grad():
        encoding.bias.copy_(-(-alibi.profile(2)[:, 1]).expm1().log())
        a, b = (attended(e, q, k, v, torch.zeros(1, 9, 32).double()) for e in (encoding, alibi))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_dape_with_a_last_layer_of_zeros_is_its_base():
    q, k, v = (torch.randn(1, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    for base in ("kerple_log", "fire", "rope", "nope"):
        encoding = build(f"dape:base={base}", 4, 32).double()
        with torch.no_grad():
            encoding.out.weight.zero_(), encoding.out.bias.zero_()
            a, b = (attended(e, q, k, v, torch.zeros(1, 9, 32)) for e in (encoding, encoding.base))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_dape_of_one_pair():
    """Two heads with scores 0.3 and -0.2, biases -1 and -0.25."""
    encoding = build("dape:base=alibi,width=2", 2, 2).double()
    encoding.base.form = lambda pos: None
    torch.nn.init.zeros_(encoding.mix.bias)
    with torch.no_grad():
        encoding.mix.weight.copy_(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]))
        encoding.mix.bias.copy_(torch.tensor([0.0, -0.4]))
        encoding.out.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
        encoding.out.bias.copy_(torch.tensor([0.1, -0.1]))
    from fairseq_rpe.core import Dense

    bias = torch.tensor([-1.0, -0.25], dtype=torch.float64).view(1, 2, 1, 1)
    encoding.base.form = lambda pos: Dense(bias)
    scores = torch.tensor([0.3, -0.2], dtype=torch.float64).view(1, 2, 1, 1)
    got = encoding.remap(scores, scores, Positions.arange(1)).flatten().tolist()
    assert got == pytest.approx([-0.5914, -0.57745], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["kerple_log", "nope"])
def test_dape_without_gradients_takes_a_few_pairs_at_a_time(base, dtype):
    """Two texts of 10,201 pairs each, no multiple of as many as are taken; some keys are not to be seen."""
    encoding, pos = build(f"dape:base={base}", 4, 32), Positions.arange(101)
    scores = torch.randn(2, 4, 101, 101).to(dtype)
    scores[:, :, torch.ones(101, 101).triu(1).bool()] = -torch.inf
    with_gradients = encoding.remap(scores, scores, pos).detach()
    with torch.no_grad():
        without = encoding.remap(scores, scores, pos)
    within = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(without, with_gradients, rtol=within, atol=within)
    assert torch.isneginf(without[..., 0, 1:]).all() and without.dtype == dtype


def test_what_layers_share():
    for spec, shared, own in (("transformer_xl", "u", "project"), ("deberta", "table", "to_key")):
        first, other = (build(spec, 2, 8) for _ in range(2))
        other.tie(first)
        assert getattr(other, shared) is getattr(first, shared) and getattr(other, own) is not getattr(first, own)


def test_verdicts():
    decisions = {
        spec: verdict(spec)[0].decision
        for spec in ("shaw", "cope", "dape", "forgetting", "forgetting:gate=fixed", "bipe:inter=alibi")
    }
    assert decisions == {
        "shaw": "diverges",
        "cope": "diverges",
        "dape": "depends on content",
        "forgetting": "depends on content",
        "forgetting:gate=fixed": "converges",
        "bipe:inter=alibi": "depends on content",
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("music", "'music' needs a number of distances: give max_distance=N or a training length"),
        ("deberta:buckets=3", "buckets=3 must be 4 to below max_distance=512"),
        ("deberta:c2p=false,p2c=none", "has no positions: use 'nope'"),
        ("forgetting:longest=9", "'forgetting:gate=full' does not read longest"),
        ("forgetting:gate=bias,shortest=9,longest=3", "shortest=9 is more than longest=3"),
        ("dape:base=t5_bias", "option 'base' of 'dape' is one of kerple_log"),
        ("dape:base=alibi,rotary_fraction=0.5", "'dape:base=alibi' does not read rotary_fraction"),
        ("cope:max_positions=1", "must be at least 2"),
    ],
)
def test_refusals(spec, message):
    with pytest.raises(UserError, match=message):
        build(spec, 2, 8)


def test_profiles():
    """Of the distance where it alone decides, and refused elsewhere."""
    fixed = build("forgetting:gate=fixed", 4, 16)
    rates = fixed.profile(5)
    assert torch.equal(rates[:, 0], torch.zeros(4, dtype=torch.float64)) and (rates.diff(dim=1) < 0).all()
    assert build("lm_infinite:original_length=3,sinks=0", 2, 8).profile(5)[0].tolist() == [
        0,
        0,
        0,
        -math.inf,
        -math.inf,
    ]
    for spec in ("shaw", "forgetting", "cope"):
        with pytest.raises(UserError, match="depends on what the tokens are: there is no bias of the distance"):
            build(spec, 2, 8).profile(3)


@pytest.mark.parametrize(
    "options", ["factors=2,factor=4,attention=none", "start_tokens=8", "short=scaled", "attention=yarn"]
)
def test_longrope_refuses_what_it_does_not_read(options):
    with pytest.raises(UserError, match="'longrope' with these options does not read"):
        build(f"longrope:{options}", 2, 8, 64)
