"""Every encoding in a model: padding, gradients, any chunks and beams of decoding, and longer than trained."""

from __future__ import annotations

import pytest
import torch
from conftest import make_model
from specs import ALL_SPECS, CONTENT_SPECS
from test_decoding import CHUNKS, fed
from test_model import PAD, tokens

from fairseq_rpe.attention import kv_cache
from fairseq_rpe.encodings import build

READERS = [
    "bipe:segment_delimiters=</s>+w1+w2+w3+w4",
    "bipe:inter=alibi,factor=2,segment_delimiters=w1+w2+w3+w4,intra=sinusoidal",
    "complex",
]
SPECS = [*ALL_SPECS, *CONTENT_SPECS, *READERS]
# what has a table of positions, or other values in longer texts, is decoded within the training length
LONGER = [spec for spec in SPECS if not spec.startswith(("learned", "tupe"))]
LONGER = [spec for spec in LONGER if spec in READERS or not build(spec, 4, 32, 16).length_dependent]
# texts of 15 and 19 tokens are longer than these were made for
GROWN = [f"rope:scaling={s},factor=auto" for s in ("linear", "ntk", "ntk_by_parts", "yarn", "truncated")]
GROWN = [f"{spec},original_length=8" for spec in (*GROWN, "rope:scaling=dynamic_ntk,factor=2", "longrope:factors=2")]
GROWN += ["clex:original_length=5,max_factor=4"]


def lively(task, spec: str, **changes):
    """What is learned starts small, or at 0, which would hide it."""
    model = make_model(task, spec, tokens_per_sample=16 if spec in LONGER else 64, **changes)
    noise = torch.Generator().manual_seed(0)
    for p in model.decoder.encodings.parameters():
        p.data += (1.0 if spec in READERS else 0.2) * torch.randn(p.shape, generator=noise)
    return model


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_equals_the_full_pass(task, spec, monkeypatch):
    """Half of a text in chunks, then other beams, then the rest; some rows begin with padding."""
    monkeypatch.setattr(kv_cache, "SPARE", 3)
    model = lively(task, spec)
    x, order = tokens(4, 23), torch.tensor([2, 1, 1, 0])
    x[1, :4], x[-1, :-2] = PAD, PAD
    y, state = x[order], {}
    with torch.no_grad():
        wanted = torch.cat([model(x)[0][:, :18], model(y)[0][:, 18:]], 1)
    found = [fed(model, x, state, CHUNKS[:6])]
    model.decoder.reorder_incremental_state_scripting(state, torch.arange(4))
    model.decoder.reorder_incremental_state_scripting(state, order)
    found.append(fed(model, y, state, CHUNKS[6:], 18))
    real = torch.cat([x[:, :18], y[:, 18:]], 1).ne(PAD)
    torch.testing.assert_close(torch.cat(found, 1)[real], wanted[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [*SPECS, *GROWN])
def test_padding_and_later_tokens_change_nothing(task, spec):
    """Left, right and no padding give a row the same logits; a longer text begins with those of a shorter."""
    model, row, other = lively(task, spec), tokens(1, 15), tokens(1, 19, seed=1)
    pads = torch.full((1, 4), PAD)
    with torch.no_grad():
        alone, whole = model(row)[0][0], model(other)[0][0]
        for padded, first in ((torch.cat([pads, row], 1), 4), (torch.cat([row, pads], 1), 0)):
            got = model(torch.cat([padded, other]))[0]
            torch.testing.assert_close(got[0, first : first + 15], alone, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[1], whole, rtol=1e-5, atol=1e-5)
        if spec in LONGER:
            x = tokens(1, 150)
            full, part = model(x)[0], model(x[:, :70])[0]
            assert full.isfinite().all()
            torch.testing.assert_close(full[:, :70], part, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [*SPECS, *GROWN[-1:]])
def test_gradients_reach_every_parameter_and_are_those_of_activation_checkpoints(task, spec):
    grads = []
    for on in (False, True):
        model = lively(task, spec, checkpoint_activations=on, attention_dropout=0.1).train()
        torch.manual_seed(3)
        model(tokens(2, 13))[0].square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None and g.isfinite().all() for g in grads[0].values())
    for name, g in grads[0].items():
        torch.testing.assert_close(grads[1][name], g, rtol=1e-5, atol=1e-7)
