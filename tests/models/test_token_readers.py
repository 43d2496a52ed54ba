"""Encodings that read the tokens, in a model; ``tests/encodings`` decodes, pads and trains them."""

from __future__ import annotations

import pytest
import torch
from conftest import make_model
from refusal import refused
from test_model import READERS, logits, tokens


def loud(task, spec, **changes):
    """A model whose learned positions are far from where they start."""
    model, noise = make_model(task, spec, **changes), torch.Generator().manual_seed(5)
    for p in model.decoder.encodings.parameters():
        p.data += torch.randn(p.shape, generator=noise)
    return model


@pytest.mark.parametrize("spec", READERS)
def test_words_before_are_seen_and_a_state_goes_into_a_model_of_the_same_dictionary(task, spec):
    """A token's logits follow from which words came before it, and not from those behind it."""
    model, x = loud(task, spec), tokens(2, 12)
    changed, other = x.clone(), make_model(task, spec, seed=1)
    changed[:, -1] = torch.where(x[:, -1] == 5, 6, 5)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        a, b = logits(model, x), logits(model, changed)
        torch.testing.assert_close(a[:, :-1], b[:, :-1])
        assert not torch.allclose(a[:, -1], b[:, -1])
        assert torch.equal(a, logits(other, x))


def test_moved_positions_keep_their_tokens(task):
    model, x = make_model(task, "complex", positions_eval="offset:by=3"), tokens(2, 9)
    with torch.no_grad():
        assert not torch.allclose(logits(model, x), logits(make_model(task, "complex"), x))
    with refused("reads no positions, so moving them does nothing"):
        make_model(task, READERS[0], positions_eval="offset:by=3")
