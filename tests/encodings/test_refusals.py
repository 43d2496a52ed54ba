"""Specs that are refused, in one line that says what to write instead, also beside a trained model's rotation."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from refusal import refused

from fairseq_rpe.encodings import Rotary, build, option, register
from fairseq_rpe.encodings.model_rotation import complete_spec_for_checkpoint

LENGTH = "give original_length=N"
SCALED = "rope:scaling={},factor=2,original_length=9"
# the last option of each is one that it does not read with the others
UNREAD = """
rope:factor=2  rope:original_length=9  rope:scaling=linear,factor=2,original_length=9
rope:scaling=ntk_by_parts,factor=2,temperature=1  rope:scaling=ntk,factor=2,beta_slow=2
rope:scaling=llama3,factor=8,original_length=9,ramp=paper  rope:scaling=truncated,truncate_high=1,factor=2
rope:scaling=truncated,factor=2,original_length=9,keep=0.5  rope:scaling=llama3,factor=8,original_length=9,mscale=1
rope:scaling=yarn,factor=2,original_length=9,ramp=paper,truncate=false  rope:keep=0.5
rope:scaling=yarn,factor=2,original_length=9,temperature=2,mscale=1
rope:scaling=proportional,keep=0.5,original_length=9  string:shift=4,window=2,original_length=9
rope:scaling=linear,factor=2,truncate_low=0  xpos:decay=0.9,gamma=1  forgetting:max_timescale=9
forgetting:gate=fixed,init=5
dape:base=alibi,rotary_fraction=0.5  bipe:factor=3  bipe:inter=alibi,base=500  bipe:intra=sinusoidal,max_intra=9
longrope:original_length=64,factors=2,attention=none,factor=4  longrope:original_length=64,start_tokens=8
longrope:original_length=64,short=scaled  longrope:original_length=64,attention=yarn
rerope:window=4,original_length=9  lm_infinite:window=5,original_length=9  streaming_llm:recent=5,original_length=9
dual_chunk:chunk=4,max_position=6,original_length=9
"""
# what the value of the last option of each must be
LIMITS = {
    "at least 1": "window:window=0  longrope:factor=0.5  clex:original_length=4,steps=0  leaky_rerope:k=0.5",
    "at least 2": "cope:max_positions=1",
    "at most 1": "rope:scaling=proportional,keep=1.5",
    "at most 2": "kerple_power:p=2.5",
    "more than 0": "rope:scaling=linear,factor=0  rope:scaling=linear,factor=-2  rope:rotary_fraction=0  xpos:gamma=0 "
    "rope:scaling=proportional,keep=0  string:temperature=0",
    "more than 0.01": "kerple_log:p=0",
    "more than 1": "rope:base=1",
    "one of heads, paper": "type1:variant=pape",
    "one of 0, 1, 2": "fire:hidden_layers=3",
    "one of none, clipped, plain": "rope:logn=often",
    "one of fixed, learned": "rope:frequencies=dimension",
    "one of none, linear.*did you mean 'yarn'": "rope:scaling=yar",
    "one of alibi, fire, kerple_log": "dape:base=t5_bias",
    "a number or auto, not 'much'": "rope:scaling=linear,factor=much",
    "wants numbers as in 1.1.5.3.4, or one of pi, ntk, yarn, not": "longrope:factors=1+much  longrope:factors=nan",
}
OTHERS = {
    "typ1": "unknown encoding 'typ1' .did you mean 'type1'.*known: abacus, alibi, .*--rpe-module",
    "sandwich:dim=7": "must be even",
    "t5_bias:max_distance=16": "more than buckets/2 = 16",
    "t5_bias:variant=clipped,max_distance=64": r"clipped.*ends at distance buckets-1 = 31.*max_distance=64",
    **{f"rope:scaling={s}": "needs factor=NUMBER" for s in ("linear", "ntk", "ntk_by_parts", "yarn", "truncated")},
    "rope:scaling=proportional": "needs keep=NUMBER or keep=auto",
    "rope:scaling=proportional,keep=auto": LENGTH,
    "rope:scaling=proportional,keep=auto,original_length=4": "no pair rotates once within .*4 tokens: .*at least 7",
    "rope:scaling=proportional,keep=0.2": "keep=0.2 keeps none of 4 pairs: give at least 1/4, or use nope",
    "rope:scaling=proportional,keep=0.5,resonance=true": "keep cannot be combined with resonance",
    "rope:scaling=proportional,keep=0.5,rotary_fraction=0.5": "keep cannot be combined with rotary_fraction",
    "rope:keep=0.5": "does not read keep: name scaling=proportional",
    "rope:frequencies=learned,resonance=true": "resonance rounds wavelengths, which frequencies=learned changes",
    "longrope:frequencies=learned": "'longrope' has no option 'frequencies'",
    **{SCALED.format("yarn") + f",{key}=1": "give both or none" for key in ("mscale", "mscale_all_dim")},
    "string": "takes shift from the original length: give shift=N or original_length=N",
    "string:shift=3,window=4": "window=4 is more than shift=3: lower window or raise shift",
    "string:shift=64,original_length=64": "shift=64 must be below the 64 tokens of the training",
    "rope:scaling=dynamic_ntk,factor=auto": "its factor, alpha, must be a number",
    "rope:scaling=dynamic_ntk": LENGTH,
    "rope:scaling=linear,factor=auto": LENGTH,
    "rope:logn=clipped": LENGTH,
    "rope:logn=plain,original_length=1": "ln L for logn, which is 0 for L = 1",
    SCALED.format("yarn") + ",beta_fast=1": "beta_fast=1 must be more than beta_slow=1",
    SCALED.format("llama3") + ",beta_slow=4": "beta_fast=4 must be more than beta_slow=4",
    SCALED.format("truncated") + ",truncate_low=2": "truncate_low=2 is above 0.349",
    SCALED.format("yarn") + ",temperature_on=rotated,logn=plain": "leave temperature_on=rotated out",
    "rope:scaling=truncated,truncate_high=1,truncate_low=2": "truncate_low=2 is above 1",
    "rope:rotary_fraction=0.4": "even and at least 2, not 3",
    "xpos:decay=1": "use that, or a decay below 1",
    "longrope:factors=1+2": "has 2 numbers for 4 rotated pairs: give 4, or one",
    "longrope:factors=1+2+3+2.5": "must not decrease: 3 is followed by 2.5",
    "longrope:factors=0.9+1+1+1": "must be at least 1, not 0.9",
    "longrope:factors=inf": "wants numbers",
    "longrope:factors=2,original_length=1": "at least 2 tokens",
    "longrope:factors=ntk": "needs factor=NUMBER",
    "longrope:factors=yarn,factor=2,short=scaled": LENGTH,
    "longrope:factors=2": LENGTH,
    "longrope:factor=2": LENGTH,
    "clex": f"'clex' needs the original length: {LENGTH}",
    "music": "'music' needs a number of distances: set max_distance=N or a training length",
    "deberta:buckets=3": "buckets=3 must be 4 to below max_distance=512",
    "deberta:c2p=false,p2c=none": "has no positions: use 'nope'",
    "forgetting:gate=bias,min_timescale=9,max_timescale=3": "min_timescale=9 is more than max_timescale=3",
    "fope": f"needs the training length: {LENGTH}",
    "fope:original_length=6": "no pair rotates once within .*6 tokens: train on at least 7",
    "self_extend:group=3,window=4": "group=3 does not divide window=4: change one of them",
    "self_extend": f"takes window from the original length: give window=N or {LENGTH.removeprefix('give ')}",
    "dual_chunk:chunk=5": "takes max_position from the original length: give max_position=N",
    "dual_chunk:chunk=9,max_position=8": "max_position=8 is less than chunk=9: raise max_position or lower chunk",
    "streaming_llm:original_length=4": "4 sinks fill a cache of 4 tokens: give recent=N",
    "rerope:window=3,logn=true": f"takes logn from the original length: {LENGTH}",
    "learned": "needs a table size",
    "tupe": "'tupe' needs a table size",
}


def last_option(spec: str) -> str:
    return re.split("[:,]", spec)[-1].partition("=")[0]


ROWS = [(spec, f"does not read.* {last_option(spec)}") for spec in UNREAD.split()]
ROWS += [(spec, f"'{last_option(spec)}'.*{words}") for words, specs in LIMITS.items() for spec in specs.split()]


@pytest.mark.parametrize(("spec", "words"), [*ROWS, *OTHERS.items()])
def test_refusals(spec, words):
    with refused(words):
        build(spec, 4, 32)


@pytest.mark.parametrize(
    ("spec", "heads", "width", "length", "words"),
    [
        ("alibi", 5, 32, None, "5 heads do not divide a model width of 32"),
        ("complex", 1, 5, None, "must be even, not 5"),
        ("fope", 4, 8, 64, "a head needs at least 4 elements, not 2"),
        *((spec, 4, 36, None, "rotated width must be even and at least 2, not 9") for spec in ("rope", "xpos")),
        *((f"{name}:max_positions=10", 4, 32, 64, "less than the training length 64") for name in ("learned", "tupe")),
    ],
)
def test_refusals_of_a_shape(spec, heads, width, length, words):
    with refused(words):
        build(spec, heads, width, length)


def test_half_of_an_odd_head_may_turn():
    build("rope:rotary_fraction=0.5", 4, 36)


# what a spec takes from the rotation that a model was trained with, and what it may not contradict

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
    assert complete_spec_for_checkpoint(spec, trained) == spec + taken
    assert complete_spec_for_checkpoint(spec + taken, trained) == spec + taken


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
        ("rope", "fope", r"is scaled \(fope\)"),
        ("bipe", HALF, "'bipe' has no option rotary_fraction"),
        ("longrope:factors=2", "rope:logn=clipped", "has no option logn, but the model's rotation has logn=clipped"),
        ("rope", "of_somebody_else", "unknown encoding 'of_somebody_else'"),
    ],
)
def test_contradictions(spec, trained, words):
    with refused(words):
        complete_spec_for_checkpoint(spec, trained)


def test_encodings_of_ones_own_are_asked_by_the_options_that_they_have():
    @register("mine_rotates")
    class Mine(Rotary):
        """One of the user's own."""

        @dataclass(frozen=True)
        class Config:
            base: float = option(10000.0, "b", above=1)
            rotary_fraction: float = option(1.0, "part", above=0, maximum=1)

    assert complete_spec_for_checkpoint("mine_rotates", HALF) == "mine_rotates:base=500000,rotary_fraction=0.5"
    with refused("has no option interleaved"):
        complete_spec_for_checkpoint("mine_rotates", "rope:interleaved=true")
