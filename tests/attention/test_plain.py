"""What is there for programs that have torch alone: attend, RelativeAttention, masks, score_mods, and their page."""

from __future__ import annotations

import doctest
import math
import re
from pathlib import Path

import pytest
import torch
from calls import assert_same, lively
from refusal import refused
from specs import CONTENT_SPECS, representatives
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fairseq_rpe
from fairseq_rpe import RelativeAttention, attend, build
from fairseq_rpe.attention import AttentionPlan, functional, reference
from fairseq_rpe.attention.forward import positions_from_padding
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import Encoding, interface

H, D, B = 4, 16, 2
PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
SPECS = [s for s in representatives() if not build(s, H, H * D, 257).is_content_dependent]
SPECS += ["sandwich", "tisa"]
ADDED = [s for s in SPECS if not build(s, H, H * D, 257).rotates]
READERS = ["rope:scaling=dynamic_ntk,original_length=8"]  # of the length of a row


def made(spec: str) -> Encoding:
    torch.manual_seed(0)
    return build(spec, heads=H, width=H * D, length=257)


def qkv(n: int, m: int | None = None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(B, H, length, D).to(dtype).requires_grad_() for length in (n, m or n, m or n)]


def with_gradients(function, encoding: Encoding, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    inputs = qkv(n, dtype=dtype)
    encoding.zero_grad()
    out = function(*inputs, encoding)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    learned = {name: p.grad.clone() for name, p in encoding.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), [x.grad for x in inputs], strict=True)), **learned}


def by_reference(q, k, v, encoding):
    pos = Positions.arange(q.shape[2])
    if regions := encoding.rotation_regions(pos):
        return reference(q, k, v, AttentionPlan(pos, rotate=encoding.rotate, rotation_regions=regions))
    q, k = encoding.rotate(q, pos.q, pos), encoding.rotate(k, pos.k, pos, key=True)
    v = encoding.value(v, pos)
    return reference(q, k, v, AttentionPlan(pos, encoding.position_bias(pos)))


def by_mask(q, k, v, encoding):
    return torch.softmax(q @ k.mT / math.sqrt(D) + encoding.mask(q.shape[2]), dim=-1) @ v


@pytest.mark.parametrize("spec", SPECS)
def test_attend_is_softmax_with_the_mask_or_the_reference(spec):
    """The reference in bfloat16, which the mask is not in, and of encodings that turn."""
    encoding = made(spec)
    for n in (1, 33):
        plainly = by_mask if spec in ADDED else by_reference
        assert_same(*(with_gradients(f, encoding, n, torch.float32) for f in (plainly, attend)))
    assert_same(*(with_gradients(f, encoding, 37, torch.bfloat16) for f in (by_reference, attend)), 0.02)


@pytest.mark.parametrize(("spec", "dropout"), [("nope", 0.0), ("kerple_log", 0.0), ("kerple_log", 0.3), ("fire", 0.3)])
def test_gradients_do_not_depend_on_the_layout(spec, dropout):
    """Heads behind tokens in memory, as in RelativeAttention; behind rows as well, as in fairseq; and one by one."""
    encoding, layouts = made(spec), [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)]
    for n in (21, 270):
        inputs, found = qkv(n), []
        for order in layouts:
            back = sorted(range(4), key=order.__getitem__)
            laid = [x.detach().permute(order).contiguous().permute(back).requires_grad_() for x in inputs]
            torch.manual_seed(3)
            out = attend(*laid, encoding, dropout=dropout)
            seeds = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
            leaves = [*laid, *encoding.parameters()]
            grads = torch.autograd.grad(out, leaves, seeds.permute(order).contiguous().permute(back))
            found.append({"out": out.detach(), **{str(i): grad for i, grad in enumerate(grads)}})
        for other in found[1:]:
            assert_same(found[0], other)


@pytest.mark.parametrize("spec", ["nope", "alibi", "window:window=5", "xpos:scale_base=16"])
def test_a_spec_is_its_encoding(spec):
    q, k, v = qkv(9)
    assert torch.equal(attend(q, k, v, spec), attend(q, k, v, made(spec)))


@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "fire", "t5_bias", "rope", "nope"])
def test_positions(spec):
    """As numbers or as Positions, of whole numbers or not, and offset, which relative encodings do not see."""
    encoding, (q, k, v) = made(spec), qkv(21)
    plain_ones = attend(q, k, v, encoding)
    for at in (torch.arange(21), torch.arange(21.0).expand(B, -1), Positions.arange(21, dtype=torch.int64)):
        assert torch.equal(attend(q, k, v, encoding, positions=at), plain_ones)
    if spec != "fire":
        moved = attend(q, k, v, encoding, positions=torch.arange(100, 121))
        torch.testing.assert_close(moved, plain_ones, rtol=1e-4, atol=1e-4)
    gaps = torch.cumsum(torch.randint(1, 4, (B, 21), generator=torch.Generator().manual_seed(3)), 1)
    for at in (gaps, gaps / 3) if encoding.position_type == "any" else (gaps,):
        ways = at, Positions(at.float(), at.float(), None, contiguous=False)
        a, b = (attend(q, k, v, encoding, positions=x) for x in ways)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert spec == "nope" or not torch.allclose(a, plain_ones, atol=1e-3)


@pytest.mark.parametrize("spec", ["alibi", "fire", "xpos", *READERS, *CONTENT_SPECS])
def test_padding_before_a_row_and_in_its_middle_changes_nothing(spec):
    """Encodings that read the length of a row have some before it alone."""
    n, encoding = 40, lively(spec, H, D, device="cpu")
    torch.manual_seed(1)
    q, k, v = torch.randn(3, B, H, n, D)
    x, padding = torch.randn(B, n, H * D), torch.zeros(B, n, dtype=torch.bool)
    padding[0, :3] = True
    padding[1, 15:25] = spec not in READERS
    notes = encoding.token_features(x) if encoding.has_token_features else None
    out = attend(q, k, v, encoding, padding=padding, features=notes)
    for row, real in enumerate(~padding):
        own = None if notes is None else notes[row : row + 1, :, real]
        alone = attend(*(y[row : row + 1, :, real] for y in (q, k, v)), encoding, features=own)
        torch.testing.assert_close(out[row : row + 1, :, real], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ADDED)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_score_mod_in_torchs_flex_attention(spec, monkeypatch):
    """As torch calls it; for a table, numbers of a head and a curve also as torch traces it, with a block mask."""
    traced = spec in ("alibi", "kerple_log", "fire")
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not traced)
    encoding = made(spec)
    with torch.no_grad():
        modified = encoding.score_mod(37)
        q, k, v = (x.detach() for x in qkv(37))
        expected = attend(q, k, v, encoding)
        torch.testing.assert_close(flex_attention(q, k, v, score_mod=modified), expected, rtol=2e-5, atol=2e-5)
        if traced:
            q, k, v = (x[:, :, :21] for x in (q, k, v))
            causal = create_block_mask(lambda b, h, i, j: j <= i, None, None, 21, 21, device="cpu")
            got = flex_attention(q, k, v, score_mod=modified, block_mask=causal)
            torch.testing.assert_close(got, expected[:, :, :21], rtol=2e-5, atol=2e-5)
    torch._dynamo.reset()


def test_mask():
    alibi, i, j = made("alibi"), torch.arange(5)[:, None], torch.arange(5)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    expected = (-slopes * (i - j)).masked_fill(j > i, -math.inf)
    assert torch.equal(alibi.mask(5), expected)
    assert torch.equal(alibi.mask(5, dtype=torch.bfloat16), expected.bfloat16())
    assert alibi.mask(5, dtype=torch.float64, device="cpu").dtype == torch.float64
    for spec in ("nope", "sinusoidal", "learned"):
        assert torch.equal(made(spec).mask(3)[H - 1], torch.zeros(3, 3).masked_fill(j[:3] > i[:3], -math.inf))
    assert made("kerple_log").half().mask(9)[:, 8].isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made("fire").mask(9), made("fire").mask(9))


@pytest.mark.parametrize("spec", [*representatives(), "transformer_xl", "music:max_distance=9"])
def test_decoding_with_a_cache(spec):
    """Token by token and in chunks. Where the length of the row counts, each step is a pass over what there is."""
    layer = RelativeAttention(H * D, H, lively(spec, H, D, 20, "cpu")).eval()
    x = torch.randn(B, 13, H * D)
    with torch.no_grad():
        for chunks in ([1] * 13, [5, 1, 7]):
            cache = layer.new_cache()
            for part in x.split(chunks, dim=1):
                got, seen = layer(part, cache), len(cache)
                whole = layer(x if not layer.encoding.length_dependent else x[:, :seen])
                expected = whole[:, seen - part.shape[1] : seen]
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            assert len(cache) == 13


def test_decoding_rows_that_begin_with_padding():
    layer = RelativeAttention(H * D, H, "fire").eval()
    x, padding = torch.randn(B, 9, H * D), torch.zeros(B, 9, dtype=torch.bool)
    padding[0, :2] = True
    cache = layer.new_cache()
    with torch.no_grad():
        whole = layer(x, padding=padding)
        steps = [layer(x[:, i : i + 1], cache, padding=padding[:, : i + 1]) for i in range(9)]
        torch.testing.assert_close(torch.cat(steps, 1)[~padding], whole[~padding], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole[:1, 2:], layer(x[:1, 2:]), rtol=1e-5, atol=1e-5)


def test_the_module_learns_and_is_saved():
    """Projections and encoding get gradients; what is saved comes back; autocast and half precision work."""
    layer = RelativeAttention(H * D, H, "kerple_log", dropout=0.1)
    x = torch.randn(B, 11, H * D)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for name, p in layer.named_parameters() if name != "k_proj.bias")
    again = RelativeAttention(H * D, H, "kerple_log").eval()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer.eval()(x)) and not torch.equal(layer.train()(x), again(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert (again(x) - again(x).float()).abs().max() < 0.05
    half = again.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16 and again.encoding.raw_p.dtype == torch.float32
    shared = build("t5_bias", heads=H, width=H * D)
    assert RelativeAttention(H * D, H, shared).encoding is RelativeAttention(H * D, H, shared).encoding
    assert "heads=4" in repr(layer)


class Squared(Encoding):
    """Changes the scores by more than a bias."""

    def transform_scores(self, scores, q, pos):
        return -scores.square()


def test_an_encoding_that_changes_scores():
    encoding, (q, k, v) = Squared(Squared.Config(), H, H * D), qkv(7)
    scores = -(q @ k.mT / math.sqrt(D)).square()
    expected = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, encoding), expected, rtol=1e-5, atol=1e-5)
    for unable in (encoding.mask, encoding.score_mod):
        with refused("Squared depends on the tokens, .*: call fairseq_rpe.attend"):
            unable(7)


def test_the_package_names_them():
    """It loads them when they are used: test_without_fairseq.py."""
    assert fairseq_rpe.__all__ == ["RelativeAttention", "attend", "build"]
    assert set(fairseq_rpe.__all__) <= set(dir(fairseq_rpe))
    with pytest.raises(AttributeError, match="module 'fairseq_rpe' has no attribute 'attendd'"):
        _ = fairseq_rpe.attendd


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_examples():
    for module in (functional, interface):
        failed, tried = doctest.testmod(module)
        assert tried and not failed
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})


@pytest.mark.parametrize("spec", [*SPECS, "longrope", "xpos:scale_base=16", "type1", "kerple_power"])
def test_float64_has_positions_in_float64(spec):
    """As with positions given in it: without any, with padding, as integers and as Positions in float32."""
    encoding, (q, k, v) = made(spec).double(), qkv(37, dtype=torch.float64)
    exact = attend(q, k, v, encoding, positions=Positions.arange(37, dtype=torch.float64))
    padding = torch.zeros(B, 37, dtype=torch.bool)
    padding[1, 30:] = True
    for options in ({}, {"positions": torch.arange(37)}, {"positions": Positions.arange(37)}):
        assert torch.equal(attend(q, k, v, encoding, **options), exact)
    if not encoding.length_dependent:
        assert torch.equal(attend(q, k, v, encoding, padding=padding)[:1], exact[:1])
    assert positions_from_padding(padding, 37, True, torch.float64)[0].k.dtype == torch.float64


def test_rope_in_float64_is_exact_to_its_digits():
    n, q = 296, torch.randn(1, 1, 296, 8, dtype=torch.float64)
    theta = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    phase = torch.polar(torch.ones(n, 4, dtype=torch.float64), torch.arange(n, dtype=torch.float64)[:, None] * theta)
    pairs = torch.complex(q[..., :4], q[..., 4:]) * phase  # (1, 1, n, 4)
    scores = (pairs @ pairs.mH).real / math.sqrt(8)
    expected = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf).softmax(-1) @ q
    assert (attend(q, q, q, "rope") - expected).abs().max() < 1e-12
    layer = RelativeAttention(8, 1, "rope").double()
    x = torch.randn(1, n, 8, dtype=torch.float64)
    cache, whole = layer.new_cache(), layer(x)
    assert (torch.cat([layer(part, cache) for part in x.split(100, dim=1)], 1) - whole).abs().max() < 1e-12
