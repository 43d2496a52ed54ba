"""What a spec takes from the rotation that a model was trained with, and what it may not contradict."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from refusal import refused

from fairseq_rpe.encodings import Rotary, option, register
from fairseq_rpe.encodings.model_rotation import complete_for_checkpoint

HALF = "rope:base=500000,rotary_fraction=0.5"


@pytest.mark.parametrize(
    ("spec", "trained", "taken"),
    [
        ("rope:scaling=linear,factor=2", HALF, ",base=500000,rotary_fraction=0.5"),
        ("longrope:factors=2", HALF, ",base=500000,rotary_fraction=0.5"),
        ("clex", HALF, ":base=500000,rotary_fraction=0.5"),
        ("rerope", "rope:interleaved=true", ":interleaved=true"),
        ("dape:base=rope", HALF, ",rope_base=500000,rotary_fraction=0.5"),
        ("xpos", "rope", ":interleaved=false"),
        ("rope:scaling=none", "xpos", ",interleaved=true"),
        ("rope", "dape:base=rope,rope_base=500", ":base=500"),
        ("bipe", "rope:base=500", ":base=500"),
        # another base is a method of rope's own; an explicit default is no open option
        ("rope:base=10000", "rope:base=500000", ""),
        ("rope:base=500000,logn=clipped", "rope", ""),
        # scores were trained with ln(i + 1) / ln 9
        ("rope:scaling=linear,factor=2", "rope:logn=clipped,original_length=9", ",logn=clipped,original_length=9"),
        ("rope:scaling=linear,factor=2,logn=none", "rope:logn=clipped", ""),
        ("longrope:factors=3", "longrope:factors=2,original_length=9", ",original_length=9"),
        # nothing is open, or nothing of theirs is rotated
        ("rope:factor=2,scaling=linear", "rope", ""),
        ("alibi", HALF, ""),
        ("longrope:factors=2", "alibi", ""),
        ("dape", HALF, ""),
        ("alibi", "of_somebody_else", ""),
    ],
)
def test_what_is_open_is_the_models(spec, trained, taken):
    assert complete_for_checkpoint(spec, trained) == spec + taken
    assert complete_for_checkpoint(spec + taken, trained) == spec + taken


@pytest.mark.parametrize(
    ("spec", "trained", "words"),
    [
        ("longrope:factors=2,base=10000", "rope:base=500000", "'rope:base=500000': give base=500000, or leave it out"),
        ("rope:rotary_fraction=1", HALF, "has rotary_fraction=1, but .*: give rotary_fraction=0.5"),
        ("rope:interleaved=false", "rope:interleaved=true", "give interleaved=true"),
        ("dape:base=rope,rope_base=10000", HALF, "give rope_base=500000"),
        ("rope", "rope:scaling=linear,factor=2", r"is scaled \(linear\), and 'rope' .*: name a scaling.*scaling=none"),
        ("clex", "rope:scaling=yarn,factor=2", r"is scaled \(yarn\), and 'clex' would drop that: use rope"),
        ("longrope:factors=2", "clex", r"is scaled \(clex\)"),
        ("bipe", HALF, "'bipe' has no option rotary_fraction"),
        ("longrope:factors=2", "rope:logn=clipped", "has no option logn, and the model's rotation has logn=clipped"),
        ("rope", "of_somebody_else", "unknown encoding 'of_somebody_else'"),
    ],
)
def test_contradictions(spec, trained, words):
    with refused(words):
        complete_for_checkpoint(spec, trained)


def test_encodings_of_ones_own_are_asked_by_the_options_that_they_have():
    @register("mine_rotates")
    class Mine(Rotary):
        """One of the user's own."""

        @dataclass(frozen=True)
        class Config:
            base: float = option(10000.0, "b", above=1)
            rotary_fraction: float = option(1.0, "part", above=0, maximum=1)

    assert complete_for_checkpoint("mine_rotates", HALF) == "mine_rotates:base=500000,rotary_fraction=0.5"
    with refused("has no option interleaved"):
        complete_for_checkpoint("mine_rotates", "rope:interleaved=true")
