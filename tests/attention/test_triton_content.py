"""Biases that depend on the tokens on the Triton backend against the reference: outputs and all gradients."""

from dataclasses import replace

import pytest
import torch
from calls import (
    D,
    H,
    assert_rounded,
    assert_same,
    buffers_of_nan,
    compare,
    in_documents,
    lively,
    outcome,
    padded,
    skipping,
)
from conftest import DEVICE
from torch import Tensor

pytest.importorskip("triton", reason="needs the package triton")

from fairseq_rpe.attention import AttentionPlan, autotune_inputs, content_bias, reference
from fairseq_rpe.attention.autotune import call_signature
from fairseq_rpe.attention.forward import build_plan, compute_token_features, with_content_bias
from fairseq_rpe.attention.triton import content_terms, refusal_reason, triton, tuning
from fairseq_rpe.core import (
    KeyTableBias,
    Positions,
    QueryKeyTableBias,
    QueryTableBias,
    SumBias,
    ToeplitzBias,
    TokenBias,
    UserError,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy's, at -inf
ONE = {"rows": 1, "heads": 1}
CALLS = [
    ("forgetting", {"n": 37} | ONE),  # numbers of tokens
    ("forgetting", padded(5, 21) | {"heads": 1}),
    ("forgetting", in_documents(19) | {"heads": 1}),
    ("forgetting:local=7", {"n": 19, "key_heads": 1, "rows": 1}),  # with a table
    ("shaw:max_distance=6", {"n": 37} | ONE),  # products of queries with few vectors
    ("shaw:max_distance=6", padded(19) | {"heads": 1}),
    ("shaw:max_distance=3,local=9,softcap=2,null_logit=learned", {"n": 21, "rows": 1}),
    ("music", {"n": 3, "m": 35} | ONE),  # with more vectors than keys
    ("deberta:max_distance=9", {"n": 37} | ONE),  # products of queries and of keys
    ("deberta:max_distance=9,null_logit=learned", padded(5, 21) | {"heads": 1}),
    ("selective_rope", padded(5, 21) | {"heads": 1}),  # other queries and keys, and no bias
    ("transformer_xl", {"n": 33} | ONE),  # products of queries with as many vectors as keys, and numbers of keys
]


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter's time depends on the number of blocks."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 32, "BLOCK_N": 32})


@pytest.mark.parametrize(("spec", "call"), CALLS)
def test_equals_the_reference(spec, call):
    compare("triton", spec, **call)


def test_small_blocks(monkeypatch):
    """Blocks of unequal sizes, of which some have keys in all columns of the table and others in the last one only."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 32, "BLOCK_N": 16})
    compare("triton", "deberta:max_distance=4", n=41, width=40, **ONE)


@pytest.mark.parametrize("spec", ["forgetting", "deberta:max_distance=9"])
def test_half_precision(spec):
    call = {"n": 37, **ONE, "dtype": torch.bfloat16}
    assert_rounded(outcome("reference", spec, **call), outcome("triton", spec, **call))


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def gradients(attend, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> dict[str, Tensor]:
    """The output, and the gradients of q, k, v and of the tensors of the bias."""
    out = attend(q, k, v, plan)
    leaves = [q, k, v, *(x for x, _ in plan.bias.tree_flatten())]
    grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return {str(index): x for index, x in enumerate([out.detach(), *grads])}


def test_sums_of_large_numbers():
    """Numbers near 10^6 that almost cancel: in float32 their sum would have an error of 0.06."""
    n = 20
    q, k, v = draw(*[(1, 1, n, D)] * 3)
    total = (1e6 + torch.rand(1, 1, n, device=DEVICE).double().cumsum(2)).neg()
    terms = total.clone().requires_grad_(), (-total).requires_grad_()
    plan = AttentionPlan(Positions.arange(n, device=DEVICE), TokenBias(*terms))
    assert_same(gradients(reference, q, k, v, plan), gradients(triton, q, k, v, plan))


def test_shared_key_heads():
    """Each of two query heads of a key head has its numbers and products; tensors of one row serve two."""
    n, heads = 9, 2
    q, k, v = draw((2, heads, n, D), (2, 1, n, D), (2, 1, n, D))
    query, key, rows, keys, table, vectors = draw(
        (1, heads, n), (2, heads, n), (1, heads, n, 5), (2, heads, n, 5), (heads, n), (1, 4, 5)
    )
    terms = TokenBias(query, key), QueryTableBias(rows, vectors), KeyTableBias(keys, vectors), ToeplitzBias(table)
    plan = AttentionPlan(Positions.arange(n, device=DEVICE), SumBias((SumBias(terms[:2]), *terms[2:])))
    assert_same(gradients(reference, q, k, v, plan), gradients(triton, q, k, v, plan))


def test_origin_and_step_of_a_table():
    """Columns before distance 0 are not read; two tokens are as far apart as two columns."""
    n = 17
    at = torch.arange(n, device=DEVICE)[None] / 2
    q, k, v, rows, vectors = draw((1, H, n, D), (1, H, n, D), (1, H, n, D), (1, H, n, 5), (H, 9, 5))
    bias = QueryTableBias(rows, vectors, origin=2, step=0.5)
    plan = AttentionPlan(Positions(at, at, 0.5), bias)
    found = gradients(triton, q, k, v, plan)
    assert_same(gradients(reference, q, k, v, plan), found)
    assert not found["5"][:, :2].any() and found["5"][:, 2:].abs().amin() > 0


def test_many_products_are_computed_in_blocks(monkeypatch):
    """Blocks of queries, with the same result."""
    calls = []
    compute = content_bias.BlockwiseAttention.apply
    monkeypatch.setattr(content_bias.BlockwiseAttention, "apply", lambda *x: calls.append(len(x)) or compute(*x))
    monkeypatch.setattr(content_terms, "MAX_PRODUCTS", 100)
    monkeypatch.setattr(content_bias, "ELEMENTS", 1 << 10)
    compare("triton", "transformer_xl", n=37, **ONE)
    assert calls
    q, k, v, plan = prepared(QueryTableBias(*draw((1, H, 16, 4), (1, 16, 4))))
    assert "without a null logit" in refusal_reason(q, k, v, replace(plan, null_logit=torch.zeros(H)))


@pytest.mark.parametrize("spec", ["forgetting", "deberta:max_distance=9"])
def test_every_element_is_written(spec):
    with buffers_of_nan():
        found = outcome("triton", spec, **padded(3, 33), heads=1)
    assert all(torch.isfinite(x).all() for x in found.values())


def test_a_hidden_key():
    """A number of -inf hides its key from all queries, as in the reference."""
    q, k, v, plan = prepared(None)
    key = torch.zeros(1, H, 16, device=DEVICE)
    key[:, :, 3] = -torch.inf
    plan = replace(plan, bias=TokenBias(torch.zeros_like(key), key))
    torch.testing.assert_close(triton(q, k, v, plan), reference(q, k, v, plan), rtol=1e-4, atol=2e-5)


def prepared(bias) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
    """q, k, v of 16 tokens and the plan of a bias."""
    q, k, v = draw(*[(1, H, 16, D)] * 3)
    return q.detach(), k.detach(), v.detach(), AttentionPlan(Positions.arange(16, device=DEVICE), bias)


def test_refusals():
    query, key, vectors = draw((1, H, 16, 4), (1, H, 16, 4), (1, 3, 4))
    by_query = QueryTableBias(query, vectors)
    product = QueryKeyTableBias(query, key, vectors)
    for bias in (product, SumBias((by_query, product)), SumBias((by_query, by_query))):
        with pytest.raises(UserError, match="one of each, and this bias has other terms: use 'sdpa'"):
            triton(*prepared(bias))
    wide = KeyTableBias(key, vectors.new_zeros(1, 1025, 4))
    assert "at most 1,024 distances, and this one has 1,025: use 'sdpa'" in refusal_reason(*prepared(wide))
    q, k, v, plan = prepared(by_query)
    uneven = replace(plan, positions=replace(skipping(16)["pos"], contiguous=False))
    assert "at evenly spaced positions only: use 'sdpa'" in refusal_reason(q, k, v, uneven)
    numbers = TokenBias(query[..., 0], key[..., 0])
    assert refusal_reason(q, k, v, replace(uneven, bias=numbers)) is None


@pytest.mark.parametrize(
    ("spec", "name"),
    [("forgetting", "tokens"), ("deberta:max_distance=5", "queries by up to 32 vectors + keys by up to 32 vectors")],
)
def test_samples_of_auto(spec, name):
    """``auto`` names the type of bias, and checks a backend with the call's bias as leaves of the sample alone."""
    q, k, v = draw(*[(3, 1, 10, D)] * 3)
    encoding = lively(spec, 1)
    plan = build_plan(encoding, Positions.arange(10, device=DEVICE), None, None)
    plan = with_content_bias(q, k, plan, compute_token_features(torch.ones(3, 10, D, device=DEVICE), plan))
    assert not plan.requires_sdpa and call_signature(q, k, v, plan).bias == name
    tensors = [q, k, v, *(x for x, _ in plan.bias.tree_flatten())]
    sample, copy = autotune_inputs.sample_call(q, k, v, plan, 0.0), autotune_inputs.copy_call(q, k, v, plan, 0.0)
    for recorded, rows in ((sample, autotune_inputs.ROWS), (copy, 3)):
        assert len(recorded.q) == rows and len(recorded.leaves) == len(tensors)
        assert not {*map(id, recorded.leaves)} & {*map(id, tensors)}
    expected, found = (sample.run(attend) for attend in (reference, triton))
    assert autotune_inputs.deviation(found, expected, 1e-4, sample.plan, sample.v) <= 1
