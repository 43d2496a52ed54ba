"""Biases that depend on the tokens: padding, decoding, quick blocks, and what refuses them."""

from __future__ import annotations

import pytest
import torch
from calls import lively
from conftest import make_model
from specs import CONTENT_SPECS

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.attention import BACKENDS, choose
from fairseq_rpe.attention.layer import carry_out, counted, noted, plan_of
from fairseq_rpe.attention.skewed import quick_block, skewed, unskewed
from fairseq_rpe.core import ByKey, ByQuery, Positions, Sum, UserError, block
from fairseq_rpe.encodings import build

B, H, D = 2, 4, 8


@pytest.mark.parametrize("spec", CONTENT_SPECS)
def test_padding_in_the_middle_of_a_row_changes_nothing(spec):
    n, encoding = 40, lively(spec, H, D, device="cpu")
    padding = torch.zeros(B, n, dtype=torch.bool)
    padding[0, :3], padding[1, 15:25] = True, True
    torch.manual_seed(1)
    q, k, v, x = (*torch.randn(3, B, H, n, D), torch.randn(B, n, H * D))

    def output(rows, seen, pos, hidden):
        plan = plan_of(encoding, pos, hidden, BACKENDS["reference"])
        return carry_out(*(y[rows][:, :, seen] for y in (q, k, v)), plan, 0.0, noted(x[rows][:, seen], plan))

    real = ~padding[1]
    whole = output(slice(None), slice(None), *counted(padding, n, False))
    alone = output(slice(1, 2), real, Positions.arange(n - 10), None)
    torch.testing.assert_close(whole[1:, :, real], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", CONTENT_SPECS)
def test_the_module_decodes_what_it_reads_at_once(spec):
    layer = RelativeAttention(H * D, H, lively(spec, H, D, 20, "cpu"))
    with torch.no_grad():
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


X = torch.zeros(B, H, 5, D)
HALVES = torch.arange(5.0)[None] / 2


def made(spec: str, width: int = D):
    return build(spec, H, H * width)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: choose("triton", [made("shaw")]), "Shaw adds a bias .*, and backend 'triton' has none: use 'sdpa'"),
        (lambda: choose("triton", [made("cope")]), "Cope needs all scores .*'triton' never .*: use 'sdpa' or"),
        (lambda: choose("flex", [made("dape")]), "Dape needs all scores of a query, which backend 'flex' never holds"),
        (lambda: choose("flex", [made("shaw:values=true")]), "Shaw needs all scores .* backend 'flex' never holds"),
        (lambda: attend(X, X, X, made("forgetting")), "reads a layer's input: give notes=encoding.note"),
        (lambda: attend(X, X, X, made("shaw"), notes=X), "Shaw takes no notes: leave them out"),
        (lambda: attend(X, X, X, made("forgetting"), notes=X[:, :, :4, :1]), r"notes are of shape \(2, 4, 4, 1\)"),
        (lambda: attend(X, X, X, made("cope"), positions=torch.arange(5)), "Cope reads no positions: leave them out"),
        (
            lambda: attend(X, X, X, made("transformer_xl"), positions=Positions(HALVES, HALVES, None, False)),
            "TransformerXL accepts whole positions only",
        ),
        (lambda: attend(X, X, X, made("shaw", 2 * D)), "is for 4 heads of width 16, q has 4 of 8"),
        (lambda: made("cope").mask(5), "depends on what the tokens are, which no mask knows"),
        (lambda: made("shaw").score_mod(5), "depends on what the tokens are, which no mask knows"),
    ],
)
def test_refusals(call, why):
    with pytest.raises(UserError, match=why):
        call()


def test_models(task):
    """Layers share what their paper shares; the flags say what cannot be served."""
    first, *others = make_model(task, "transformer_xl").decoder.encodings
    assert others and all(e.u is first.u and e.project is not first.project for e in others)
    with pytest.raises(UserError, match="backend 'triton' has none"):
        make_model(task, "shaw", attention_backend="triton")
    with pytest.raises(UserError, match="adds no bias of the distance alone: its attention cannot be pruned"):
        make_model(task, "cope").decoder.prune_attention(1e-3)


@pytest.mark.parametrize("spec", ["forgetting", "dape", "deberta"])
def test_checkpointed_layers_learn_the_same(task, spec):
    tokens, gradients = torch.randint(4, 60, (2, 17), generator=torch.Generator().manual_seed(0)), []
    for checkpointed in (False, True):
        model = make_model(task, spec, checkpoint_activations=checkpointed).train()
        model(tokens)[0].square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(grad, gradients[1][name], rtol=1e-4, atol=1e-6)
