"""What every encoding has to do in a model, for those that read the tokens: decoding, padding, checkpoints."""

from __future__ import annotations

import pytest
import test_decoding
import test_model
import torch
from conftest import make_model
from test_model import logits, tokens

from fairseq_rpe.core import UserError

SPECS = ["bipe:ends=</s>+w1+w2+w3+w4", "bipe:inter=alibi,factor=2,ends=w1+w2+w3+w4,intra=sinusoidal", "complex"]


def loud(task, spec, **changes):
    """A model whose learned positions are far from where they start."""
    model = make_model(task, spec, **changes)
    generator = torch.Generator().manual_seed(5)
    for p in model.decoder.encodings.parameters():
        p.data += torch.randn(p.shape, generator=generator)
    return model


@pytest.fixture(autouse=True)
def far_from_the_start(monkeypatch):
    for module in (test_model, test_decoding):
        monkeypatch.setattr(module, "make_model", loud)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_that_reads_tokens(task, spec):
    test_model.test_padding_changes_nothing(task, spec)
    test_model.test_padding_in_the_middle_is_not_counted(task, spec)
    test_model.test_checkpoint_activations_changes_nothing(task, spec, "model")
    test_model.test_longer_than_trained(task, spec)
    test_decoding.test_chunks_beams_and_padding(task, spec, "fp32")


@pytest.mark.parametrize("spec", SPECS)
def test_other_words_before_are_seen(task, spec):
    """A token's logits follow from which words came before it, and not from those behind it."""
    model, x = loud(task, spec), tokens(1, 12)
    other = x.clone()
    other[0, -1] = 5 if x[0, -1] != 5 else 6
    with torch.no_grad():
        torch.testing.assert_close(logits(model, x)[:, :-1], logits(model, other)[:, :-1])
        assert not torch.allclose(logits(model, x)[:, -1], logits(model, other)[:, -1])


@pytest.mark.parametrize("spec", SPECS)
def test_a_state_goes_into_a_model_of_the_same_dictionary(task, spec):
    model, other = loud(task, spec), make_model(task, spec, seed=1)
    other.load_state_dict(model.state_dict())
    x = tokens(2, 15)
    with torch.no_grad():
        assert torch.equal(logits(model, x), logits(other, x))


def test_a_dictionary_without_such_symbols_is_refused(task):
    with pytest.raises(UserError, match=r"'bipe:ends=</s>\+.': no symbol of the dictionary is or ends in '.'"):
        make_model(task, "bipe")


def test_moved_positions_keep_their_tokens(task):
    model = make_model(task, "complex", positions_eval="offset:by=3")
    x = tokens(2, 9)
    with torch.no_grad():
        assert not torch.allclose(logits(model, x), logits(make_model(task, "complex"), x))
    with pytest.raises(UserError, match="reads no positions, so moving them does nothing"):
        make_model(task, SPECS[0], positions_eval="offset:by=3")
