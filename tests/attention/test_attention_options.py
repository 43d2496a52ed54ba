"""Options of every encoding (windows, blocks, query scales, softcap, null logit), and key heads that queries share."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from refusal import refused
from torch import Tensor

from fairseq_rpe import attend, build
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.reference import attention_scores, attention_weights
from fairseq_rpe.core import Positions
from fairseq_rpe.core.attention_options import AttentionOptions
from fairseq_rpe.encodings import names, normalise
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.encodings.query_scale import QueryScale

# one combination for each option and each type of bias that it meets
SPECS = [
    "rope:local=6",
    "alibi:local=150",
    "kerple_log:local=6",
    "fire:local=6",
    "sandwich:local=140",
    "deberta:local=6",
    "alibi:block=6",
    "rope:block=140",
    "fire:block=6",
    "shaw:block=6",
    "nope:query_scale=ssmax",
    "alibi:query_scale=llama4,query_scale_interval=5",
    "rope:softcap=1",
    "deberta:softcap=1,null_logit=zero",
    "kerple_log:null_logit=learned,local=6",
    "shaw:null_logit=learned",
    "rope:local=6,softcap=2,null_logit=learned,query_scale=head",
]
# toy input of 5 tokens with a head of width 4 and float64
TOY = torch.arange(1.0, 21.0, dtype=torch.float64).view(1, 1, 5, 4)
Q, K, V = TOY.sin(), TOY.cos(), (TOY / 2).sin()


def _scores_of_last_query(q: Tensor, plan: AttentionPlan) -> Tensor:
    return attention_scores(q, K, plan)[0, 0, 4]


def _close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=5e-10, rtol=0)


def test_softcap_of_the_toy_input() -> None:
    plan = AttentionPlan(Positions.arange(5, dtype=torch.float64), softcap=2.0)
    _close(_scores_of_last_query(Q, plan), [-0.4672316315, -0.4962374800, 1.0296702269, -0.9097243305, 0.1444444608])


@pytest.mark.parametrize(
    ("logit", "total", "output"),
    [
        (0.0, 0.8545742461, [-0.2021961872, -0.2419634882, -0.2224896886, -0.1485426535]),
        (0.5, 0.7809032267, [-0.1847652860, -0.2211043330, -0.2033093280, -0.1357371088]),
    ],
)
def test_null_logit_of_the_toy_input(logit: float, total: float, output: list[float]) -> None:
    plan = AttentionPlan(
        Positions.arange(5, dtype=torch.float64), null_logit=torch.tensor([logit], dtype=torch.float64)
    )
    weights = attention_weights(Q, K, plan)
    _close(weights[0, 0, 4].sum()[None], [total])
    _close((weights @ V)[0, 0, 4], output)


def test_null_logit_zero_adds_one_to_the_denominator() -> None:
    encoding = build("nope:null_logit=zero", 1, 4)
    plain = AttentionPlan(Positions.arange(5, dtype=torch.float64))
    exp = attention_scores(Q, K, plain).exp()
    expected = (exp / (1 + exp.sum(-1, keepdim=True))) @ V
    torch.testing.assert_close(attend(Q, K, V, encoding, backend="sdpa"), expected)


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        (
            {"query_scale": "ssmax", "query_scale_value": 0.43},
            {0: 0, 1: 0.2980532876, 63: 1.7883197258, 1151: 3.0311795817},
        ),
        (
            {"query_scale": "llama4", "query_scale_interval": 8192},
            {8190: 1, 8191: 1.0693147181, 16382: 1.0693147181, 16383: 1.1098612289, 131071: 1.2833213344},
        ),
        (
            {"query_scale": "ministral", "query_scale_interval": 16384},
            {16383: 1, 16384: 1.0693147181, 32768: 1.1098612289},
        ),
        (
            {"query_scale": "inkling", "query_scale_interval": 128000},
            {127999: 1, 255999: 1.0693147181, 1048575: 1.2103158068},
        ),
        ({"query_scale": "logn", "query_scale_interval": 64}, {3: 1, 63: 1, 4095: 2}),
        (
            {"query_scale": "ssmax", "query_scale_value": 1.0, "local": 64},
            {31: math.log(32), 63: math.log(64), 900: math.log(64)},
        ),
        ({"query_scale": "ssmax", "query_scale_value": 1.0, "block": 64}, {63: math.log(64), 64: 0, 66: math.log(3)}),
    ],
)
def test_query_scales(options: dict[str, float], factors: dict[int, float]) -> None:
    at = torch.tensor([[float(i) for i in factors]], dtype=torch.float64)
    scale = QueryScale(AttentionOptions(**options), heads=2, length=None).double()  # type: ignore[arg-type]
    result = scale(Positions(at, at, None))[0, 0, :, 0]
    # the parameter of ssmax is float32, so its factors have 7 digits
    torch.testing.assert_close(result, torch.tensor([*factors.values()], dtype=torch.float64), atol=5e-10, rtol=3e-8)


def test_initial_ssmax_has_the_factor_1_at_the_training_length() -> None:
    encoding = build("nope:query_scale=ssmax", 3, 12, length=32)
    at = torch.tensor([[31.0]])
    torch.testing.assert_close(encoding.query_scale(Positions(at, at)), torch.ones(1, 3, 1, 1))


def test_query_scale_of_the_toy_input() -> None:
    encoding = build("nope:query_scale=ssmax,query_scale_value=0.43", 1, 4)
    with torch.no_grad():  # the parameter is float32
        encoding.query_scale.value = torch.nn.Parameter(encoding.query_scale.value.double().fill_(0.43))
    _close(attend(Q, K, V, encoding)[0, 0, 4], [-0.0748022853, -0.1175492219, -0.1315160093, -0.1132830909])


def _gradients(spec: str, heads: int, key_heads: int, n: int, dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Return the output and all gradients of attention of random inputs."""
    torch.manual_seed(1)
    encoding = build(spec, heads, heads * 8, length=16)
    generator = torch.Generator().manual_seed(2)
    shapes = (2, heads, n, 8), (2, key_heads, n, 8), (2, key_heads, n, 8)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    y = attend(q, k, v, encoding, backend=backend)
    parameters = [p for p in encoding.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y.float().square().sum(), [q, k, v, *parameters], allow_unused=True)
    return [y, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [13, 291])
def test_sdpa_equals_the_reference(spec: str, n: int) -> None:
    for actual, expected in zip(
        _gradients(spec, 4, 4, n, torch.float32, "sdpa"),
        _gradients(spec, 4, 4, n, torch.float32, "reference"),
        strict=True,
    ):
        torch.testing.assert_close(
            actual, expected, atol=1e-4 * max(1.0, float(expected.detach().abs().max())), rtol=1e-4
        )


@pytest.mark.parametrize("spec", ["alibi:block=50", "rope:block=200", "alibi:block=50,softcap=3"])
@pytest.mark.parametrize("new", [150, 254])
def test_many_new_tokens_after_cached_ones_are_those_of_one_pass(spec: str, new: int) -> None:
    q, k, v = torch.randn(3, 1, 4, 300, 8, generator=torch.Generator().manual_seed(0))
    expected = attend(q, k, v, spec, backend="sdpa")[:, :, -new:]
    torch.testing.assert_close(attend(q[:, :, -new:], k, v, spec, backend="sdpa"), expected)


@pytest.mark.parametrize("spec", ["rope:local=70", "alibi:block=70,softcap=3,null_logit=learned"])
def test_bfloat16(spec: str) -> None:
    for actual, expected in zip(
        _gradients(spec, 4, 2, 291, torch.bfloat16, "sdpa"),
        _gradients(spec, 4, 2, 291, torch.bfloat16, "reference"),
        strict=True,
    ):
        error, scale = (actual.float() - expected.float()).norm(), expected.float().norm()
        assert error < 0.01 * scale


@pytest.mark.parametrize("spec", ["rope:local=100", "nope:local=64", "alibi:local=291", "alibi:local=1"])
def test_window_is_the_mask_of_the_nearest_keys(spec: str) -> None:
    """All blocks of the windowed attention, the first and the last included, against a mask written out."""
    n, window = 291, int(spec.partition("local=")[2])
    encoding, plain = build(spec, 2, 16), build(spec.partition(":")[0], 2, 16)
    q, k, v = torch.randn(3, 2, 2, n, 8, dtype=torch.float64)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= window)
    pos = Positions.arange(n, dtype=torch.float64)
    if plain.rotates:
        scores = plain.rotate(q, pos.q, pos) @ plain.rotate(k, pos.k, pos, key=True).mT
    else:
        scores = q @ k.mT
    scores = scores / 8**0.5
    if (bias := plain.position_bias(pos)) is not None:
        scores = scores + bias.materialize(pos)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, encoding, backend="sdpa"), expected)


def test_block_sees_its_own_tokens_only() -> None:
    q, k, v = torch.randn(3, 2, 2, 7, 8)
    encoding = build("nope:block=3", 2, 16)
    expected = torch.cat([attend(*(x[:, :, a : a + 3] for x in (q, k, v)), "nope") for a in (0, 3, 6)], dim=2)
    torch.testing.assert_close(attend(q, k, v, encoding, backend="sdpa"), expected)


def test_window_counts_positions_not_tokens() -> None:
    """A window of 4 positions holds 2 keys of a text whose positions are 2 apart."""
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    sparse = attend(q, k, v, build("nope:local=4", 2, 16), positions=2.0 * torch.arange(9))
    torch.testing.assert_close(sparse, attend(q, k, v, build("nope:local=2", 2, 16)))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    "spec", ["rope", "fire", "cope", "deberta", "alibi:local=6,null_logit=learned", "rerope:window=4"]
)
def test_key_heads_that_queries_share(spec: str, backend: str) -> None:
    """Query head h reads key head h // 2, as if each key head were repeated twice in a row."""
    torch.manual_seed(1)
    encoding = build(spec, 4, 32, length=16)
    q, k, v = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 37, 8), torch.randn(2, 2, 37, 8)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    repeated = q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    outputs = attend(q, k, v, encoding, backend=backend), attend(*repeated, encoding, backend=backend)
    torch.testing.assert_close(*outputs)
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in outputs]
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_key_heads_must_divide_heads() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 3, 5, 8)
    with refused("3 key heads do not divide 4 query heads"):
        attend(q, k, k, "alibi")
    with refused("floater adds vectors of 4 heads to 2 key heads"):
        attend(q, k[:, :2], k[:, :2], build("floater:steps=1", 4, 32))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rope:local=0.5", "wants a whole number"),
        ("rope:local=-1", "at least 0"),
        ("rope:locall=3", "did you mean 'local'"),
        ("rope:local=4,block=4", "two ways to hide far keys"),
        ("window:window=4,local=3", "hides keys itself"),
        ("streaming_llm:local=3", "hides keys itself"),
        ("rerope:local=3", "rotates pairs by region"),
        ("rerope:null_logit=zero", "several regions"),
        ("cope:local=3", "needs the scores of all keys"),
        ("shaw:query_scale=ssmax", "reads queries"),
        ("nope:query_scale=llama3", "did you mean 'llama4'"),
        ("nope:query_scale=ssmax,query_scale_interval=4", "has no query_scale_interval"),
        ("nope:query_scale_value=4", "has no query_scale_value"),
        ("nope:query_scale=llama4", "give query_scale_interval"),
        ("alibi:softcap=-1", "at least 0"),
        ("huang:method=1,max_distance=20,softcap=1", "multiplies q·k"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with refused(message):
        build(spec, 2, 16, length=16 if "streaming" in spec or "rerope" in spec else None)


def test_mask_has_the_window_and_refuses_other_options() -> None:
    mask = build("alibi:local=2", 2, 16).mask(4)
    assert mask[0].isneginf().tolist() == [
        [False, True, True, True],
        [False, False, True, True],
        [True, False, False, True],
        [True, True, False, False],
    ]
    with refused("option softcap, which a mask cannot express"):
        build("alibi:softcap=2", 2, 16).mask(4)


@pytest.mark.parametrize("name", names())
def test_canonical_form_has_only_options_that_change_something(name: str) -> None:
    assert normalise(f"{name}:softcap=0,null_logit=none") == name
    assert normalise(f"{name}: softcap = 50.0") == f"{name}:softcap=50"


def test_copies_of_an_encoding_keep_its_options() -> None:
    encoding = build("rope:local=4,base=500", 2, 16)
    for copied in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert copied.attention_options.local == 4 and copied.config == encoding.config


def test_learned_options_belong_to_a_layer_and_other_parameters_keep_their_sharing() -> None:
    encodings = build_for_model("t5_bias:query_scale=head,null_logit=learned", 2, 16, layers=3)
    first, second, _ = encodings
    assert encodings.index == (0, 1, 2)
    assert first.query_scale.value is not second.query_scale.value and first.null_logit is not second.null_logit
    own = {name for name, p in second.named_parameters() if any(p is other for other in first.parameters())}
    assert own == {name for name, _ in build("t5_bias", 2, 16).named_parameters()}
    assert len(build_for_model("t5_bias:query_scale=head", 2, 16, layers=3, share="model")) == 1
