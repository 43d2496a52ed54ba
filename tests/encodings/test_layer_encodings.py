"""Encodings of a pattern of layers: instances, sharing, weights, and the rotation of a checkpoint."""

from __future__ import annotations

import pytest
import torch
from refusal import refused

from fairseq_rpe.core.layer_pattern import LayerGroup
from fairseq_rpe.encodings import build, normalise
from fairseq_rpe.encodings.model import build_for_model, instance_groups, match_weights, sharing_modes
from fairseq_rpe.encodings.model_rotation import complete_spec_for_checkpoint
from fairseq_rpe.encodings.rope_extrapolation import check_trained_rotation

SIZES = {"heads": 4, "width": 32, "length": 64}


def built(spec: str, layers: int = 6, share: str = "auto"):
    torch.manual_seed(0)
    return build_for_model(spec, layers=layers, share=share, **SIZES)


def test_layers_share_or_own_an_instance_as_their_encoding_does():
    encodings = built("2*kerple_log|fire|nope")
    assert encodings.specs == ("kerple_log", "fire", "nope")  # layers 0, 1, 4, 5; 2; 3
    assert encodings.index == (0, 0, 1, 2, 0, 0) and encodings.is_mixed
    encodings = built("kerple_log|fire")  # fire has one instance per layer
    assert encodings.specs == ("kerple_log", "fire", "fire", "fire") and encodings.index == (0, 1, 0, 2, 0, 3)
    assert encodings.layer(3) is encodings[2] and encodings.layers(0) == (0, 2, 4)
    assert {name.partition(".")[0] for name in encodings.state_dict()} == {"0", "1", "2", "3"}


def test_rpe_share_in_a_pattern():
    assert built("kerple_log|alibi", share="layer").index == (0, 1, 2, 3, 4, 5)
    assert built("kerple_log|fire", share="model").index == (0, 1, 0, 1, 0, 1)
    assert built("fire|nope", share="layer").index == (0, 1, 2, 1, 3, 1)  # nope can only be shared
    assert sharing_modes("rope|fire") == ("model", "layer")
    with refused("--rpe-share layer: 'rope\\|nope' can only be shared by: model"):
        built("rope|nope", share="layer")


def test_tied_parameters_are_those_of_the_layers_of_the_same_part():
    encodings = built("deberta:max_distance=5|deberta:max_distance=6")
    tables = [encodings.layer(layer).table for layer in range(6)]
    assert tables[0] is tables[2] is tables[4] and tables[1] is tables[3] is tables[5]
    assert tables[0] is not tables[1]


@pytest.mark.parametrize("spec", ["kerple_log", "fire", "rope"])
def test_equal_parts_are_the_plain_spec(spec):
    assert normalise(f"2*{spec}|{spec}") == spec
    plain, pattern = built(spec), built(f"2*{spec}|{spec}")
    assert plain.index == pattern.index and plain.specs == pattern.specs
    torch.testing.assert_close(pattern.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_specs_are_compared_in_their_canonical_form():
    assert normalise("rope:base=1e4|2*nope|rope|2*nope") == "rope|2*nope"
    assert len(built("rope:base=1e4|rope")) == 1


def test_encodings_at_the_input_cannot_be_those_of_some_layers():
    with refused("'sinusoidal' acts at the input of the model"):
        built("rope|sinusoidal")
    assert built("sinusoidal|sinusoidal").layer(5).embeds


def test_one_encoding_is_expected_by_build():
    with refused("'2\\*rope\\|nope' is a pattern of layers, and one encoding is expected here"):
        build("2*rope|nope", 4, 32)
    with refused("unknown encoding 'nopo'"):
        built("2*rope|nopo")


def test_instances():
    assert instance_groups("2*rope|fire", 5) == (LayerGroup("rope", (0, 1, 3, 4)), LayerGroup("fire", (2,)))


def test_weights_follow_their_layers():
    fire, other = {"c": torch.ones(1)}, {"c": torch.zeros(1)}
    # 3*rope|fire in 8 layers -> rope|nope|rope|fire: instances rope, fire, fire -> rope, nope, fire, fire
    assert match_weights([{}, fire, other], (0, 0, 0, 1, 0, 0, 0, 2), (0, 1, 0, 2, 0, 1, 0, 3)) == [{}, {}, fire, other]
    assert match_weights([fire], (0, 0), (0, 1)) == [fire, fire]
    assert match_weights([], (0, 0), (0, 1)) == [{}, {}]
    with refused("layers 0-1 would share an encoding"):
        match_weights([fire, other], (0, 1), (0, 0))


TRAINED = "2*rope:base=500000,local=16|rope:base=250000|nope"
COMPLETED = {  # spec of the evaluation -> with what it takes over
    "rope:scaling=linear,factor=2": "2*rope:scaling=linear,factor=2,base=500000,local=16|"
    "rope:scaling=linear,factor=2,base=250000|nope",
    "rope:local=8": "2*rope:local=8,base=500000|rope:local=8,base=250000|nope",
    "nope": "nope",
    "2*nope|rope|nope": "2*nope|rope:base=250000|nope",
    "2*rope:local=4|rope|nope": "2*rope:local=4,base=500000|rope:base=250000|nope",
    "alibi": "alibi",
}


@pytest.mark.parametrize("spec", COMPLETED)
def test_a_spec_takes_over_the_rotations_of_a_pattern(spec):
    completed = complete_spec_for_checkpoint(spec, TRAINED)
    assert completed == COMPLETED[spec]
    assert complete_spec_for_checkpoint(completed, TRAINED) == completed


def test_contradictions_with_the_rotations_of_a_pattern():
    with refused("'rope' replaces different rotations of .*: state its options, as in 'rope:base=500000'"):
        complete_spec_for_checkpoint("3*rope|nope", TRAINED)
    with refused("but the model was trained with 'rope:base=250000"):
        complete_spec_for_checkpoint("2*nope|rope:interleaved=true|nope", TRAINED)
    with refused("no layer of the model, '2\\*alibi\\|nope', does"):
        complete_spec_for_checkpoint("rope:scaling=linear,factor=2", "2*alibi|nope")
    assert complete_spec_for_checkpoint("2*rope|nope", "rope:base=7") == "2*rope:base=7|nope"
    with refused("'self_extend' reads models that were trained with rope, and this one was with 'nope'"):
        check_trained_rotation("self_extend", "2*rope|nope")
    check_trained_rotation("2*self_extend|nope", "2*rope|nope")
    assert complete_spec_for_checkpoint("self_extend", "2*rope|nope") == "2*self_extend|nope"


def test_another_query_scale_leaves_the_numbers_of_the_replaced_one():
    trained = "rope:local=8,query_scale=llama4,query_scale_value=0.2,query_scale_interval=4|nope"
    replaced = complete_spec_for_checkpoint("rope:query_scale=constant", trained)
    assert replaced == "rope:query_scale=constant,local=8|nope"
