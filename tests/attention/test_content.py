"""Biases that depend on the tokens, on every backend: outputs, all gradients, decoding, padding, odd lengths, bf16."""

from __future__ import annotations

import importlib

import pytest
import torch
from conftest import DEVICE, make_model
from specs import CONTENT_SPECS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.attention import BACKENDS, choose
from fairseq_rpe.attention.layer import carry_out, counted, noted, plan_of
from fairseq_rpe.attention.skewed import quick_block, skewed, unskewed
from fairseq_rpe.core import ByKey, ByQuery, Positions, Sum, UserError, block
from fairseq_rpe.encodings import build

B, H, D = 2, 4, 8
ROWS = importlib.import_module("fairseq_rpe.attention.rows")


@torch.no_grad()
def lively(spec, length=20):
    torch.manual_seed(0)
    encoding = build(spec, H, H * D, length)
    for parameter in encoding.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return encoding


def found(spec, backend, n, dtype=torch.float32, dropout=0.0, pos=None, padding=None, grads=True):
    encoding = lively(spec)
    torch.manual_seed(1)
    q, k, v = (torch.randn(B, H, n, D).to(dtype).requires_grad_(grads) for _ in range(3))
    x = torch.randn(B, n, H * D).to(dtype)
    plan = plan_of(encoding, pos or Positions.arange(n), padding, choose(backend, [encoding]))
    torch.manual_seed(2)
    out = carry_out(q, k, v, plan, dropout, noted(x, plan))
    if not grads:
        return [out]
    leaves = [q, k, v, *(p for p in encoding.parameters() if p.requires_grad)]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    if padding is not None:
        cotangent = cotangent.masked_fill(padding[:, None, :, None], 0.0)
    return [out, *torch.autograd.grad(out, leaves, cotangent, allow_unused=True)]


def same(a, b, tolerance=2e-5):
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.isfinite(x).all()
            assert (x - y).abs().max() <= tolerance * max(1.0, x.abs().max())


@pytest.mark.parametrize("spec", CONTENT_SPECS)
def test_blocks_equal_the_reference(spec, monkeypatch):
    """Of 16 queries each, with dropout 128: 301 are three of those, the last one ragged."""
    monkeypatch.setattr(ROWS, "ELEMENTS", 1)
    for n in (1, 2, 37, 301):
        same(*(found(spec, name, n) for name in ("reference", "sdpa")))
    same(*(found(spec, name, 131, dropout=0.2) for name in ("reference", "sdpa")))
    same(*(found(spec, name, 131, torch.bfloat16) for name in ("reference", "sdpa")), 0.02)


@pytest.mark.parametrize("spec", CONTENT_SPECS)
def test_padding_and_positions_that_skip(spec, monkeypatch):
    monkeypatch.setattr(ROWS, "ELEMENTS", 1)
    n = 140
    padding = torch.zeros(B, n, dtype=torch.bool)
    padding[0, :3], padding[1, 50:60] = True, True
    pos, hidden = counted(padding, n, False)
    reference = found(spec, "reference", n, pos=pos, padding=hidden)
    same(reference, found(spec, "sdpa", n, pos=pos, padding=hidden))
    encoding = lively(spec)
    torch.manual_seed(1)
    q, k, v = (torch.randn(B, H, n, D) for _ in range(3))
    x = torch.randn(B, n, H * D)
    real = ~padding[1]
    plan = plan_of(encoding, Positions.arange(n - 10), None, BACKENDS["reference"])
    alone = carry_out(*(y[1:, :, real] for y in (q, k, v)), plan, 0.0, noted(x[1:, real], plan))
    torch.testing.assert_close(reference[0][1:, :, real], alone, rtol=1e-5, atol=1e-5)
    at = torch.randint(1, 4, (B, n), generator=torch.Generator().manual_seed(4)).cumsum(1).float()
    skipping = Positions(at, at, 1.0, contiguous=False)
    same(*(found(spec, name, n, pos=skipping) for name in ("reference", "sdpa")))


@pytest.mark.parametrize("spec", CONTENT_SPECS)
def test_the_module_decodes_what_it_reads_at_once(spec):
    torch.manual_seed(0)
    layer = RelativeAttention(H * D, H, spec, length=20)
    with torch.no_grad():
        for parameter in layer.encoding.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        x = torch.randn(B, 29, H * D)
        whole, cache = layer(x), layer.new_cache()
        parts = [layer(part, cache) for part in x.split([13, 1, 1, 6, 8], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_skewing_is_the_papers():
    """Huang et al.: rows of X, of distances 2 1 0, shifted so that entry (i, j) is of distance i - j."""
    x = torch.arange(9.0).view(1, 1, 3, 3)
    padded = torch.nn.functional.pad(x, (1, 0))
    assert skewed(padded)[0, 0].tril().tolist() == [[2, 0, 0], [4, 5, 0], [6, 7, 8]]
    lower = torch.randn(2, 3, 5, 9).tril(4)
    back = skewed(torch.nn.functional.pad(unskewed(lower), (1, 0)))
    assert torch.equal(back.tril(4), lower)


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("columns", [1, 2, 5, 9, 30])
def test_quick_blocks(rows, columns):
    torch.manual_seed(0)
    keys, vectors = 9, torch.randn(1, columns, 4)
    pos, seen = Positions.arange(rows, keys), torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    forms = (ByQuery(torch.randn(2, 3, rows, 4), vectors), ByKey(torch.randn(2, 3, keys, 4), vectors))
    for form in (*forms, Sum(forms)):
        a, b = (x.masked_fill(~seen, 0.0) for x in (quick_block(form, pos), block(form, pos)))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class _LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_a_factor_for_each_distance_makes_no_products_for_each_element():
    """Method 1 multiplies scores: a number for each pair, in the forward and the backward pass."""
    n = 64
    with _LargestTensor() as largest:
        found("huang:method=1,max_distance=40", "sdpa", n)
    assert largest.elements == B * H * n * n


@pytest.mark.skipif(DEVICE != "cpu", reason="FlexAttention's forward pass without a compiler")
@pytest.mark.parametrize("spec", ["shaw:clip=5", "music:max_distance=9", "transformer_xl", "deberta", "forgetting"])
def test_flex(spec):
    with torch.no_grad():
        same(*(found(spec, name, 37, grads=False) for name in ("reference", "flex")))


def test_refusals():
    for name, spec, why in (
        ("triton", "shaw", "Shaw adds a bias that depends on the tokens, and backend 'triton' has none: use 'sdpa'"),
        (
            "triton",
            "cope",
            "Cope needs all scores of a query, which backend 'triton' never holds: use 'sdpa' or 'auto'",
        ),
        ("flex", "dape", "Dape needs all scores of a query, which backend 'flex' never holds"),
        ("flex", "shaw:values=true", "Shaw needs all scores of a query, which backend 'flex' never holds"),
    ):
        with pytest.raises(UserError, match=why):
            choose(name, [build(spec, H, H * D)])
    with pytest.raises(UserError, match=r"backend 'flex' has no products .*: use 'sdpa'"):
        found("huang:method=3,max_distance=5", "flex", 3, grads=False)
    with pytest.raises(UserError, match=r"table of at most 1,024 distances, and this one has 1,201: use 'sdpa'"):
        found("music:max_distance=1200", "flex", 3, grads=False)
    x = torch.zeros(B, H, 5, D)
    with pytest.raises(UserError, match="Forgetting reads a layer's input: give notes=encoding.note"):
        attend(x, x, x, build("forgetting", H, H * D))
    with pytest.raises(UserError, match="Shaw takes no notes: leave them out"):
        attend(x, x, x, build("shaw", H, H * D), notes=x)
    with pytest.raises(UserError, match=r"notes are of shape \(2, 4, 4, 1\)"):
        attend(x, x, x, build("forgetting", H, H * D), notes=x[:, :, :4, :1])
    with pytest.raises(UserError, match="Cope reads no positions: leave them out"):
        attend(x, x, x, build("cope", H, H * D), positions=torch.arange(5))
    halves = torch.arange(5.0)[None] / 2
    with pytest.raises(UserError, match="TransformerXL accepts whole positions only"):
        attend(x, x, x, build("transformer_xl", H, H * D), positions=Positions(halves, halves, None, False))
    with pytest.raises(UserError, match="is for 4 heads of width 16, q has 4 of 8"):
        attend(x, x, x, build("shaw", H, 2 * H * D))
    for refused in (build("cope", H, H * D).mask, build("shaw", H, H * D).score_mod):
        with pytest.raises(UserError, match="depends on what the tokens are, which no mask knows"):
            refused(5)


def test_models(task):
    """Layers share what their paper shares; the flags say what cannot be served; checkpointed layers learn the same."""
    model = make_model(task, "transformer_xl")
    first, *others = model.decoder.encodings
    assert others and all(e.u is first.u and e.project is not first.project for e in others)
    with pytest.raises(UserError, match="backend 'triton' has none"):
        make_model(task, "shaw", attention_backend="triton")
    with pytest.raises(UserError, match="adds no bias of the distance alone: its attention cannot be pruned"):
        make_model(task, "cope").decoder.prune_attention(1e-3)
    tokens = torch.randint(4, 60, (2, 17), generator=torch.Generator().manual_seed(0))
    for spec in ("forgetting", "dape", "deberta"):
        gradients = []
        for checkpointed in (False, True):
            model = make_model(task, spec, checkpoint_activations=checkpointed).train()
            model(tokens)[0].square().mean().backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        for name, grad in gradients[0].items():
            torch.testing.assert_close(grad, gradients[1][name], rtol=1e-4, atol=1e-6)
