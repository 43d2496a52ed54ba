"""Specs that an encoding refuses, each in one line that says what is wrong and often what to write instead."""

from __future__ import annotations

import re

import pytest
from refusal import refused

from fairseq_rpe.encodings import build

LENGTH = "give original_length=N"
SCALED = "rope:scaling={},factor=2,original_length=9"
# the last option of each is one that it does not read with the others
UNREAD = """
rope:factor=2  rope:original_length=9  rope:scaling=linear,factor=2,original_length=9
rope:scaling=ntk_by_parts,factor=2,temperature=1  rope:scaling=ntk,factor=2,beta_slow=2
rope:scaling=llama3,factor=8,original_length=9,ramp=paper  rope:scaling=truncated,truncate_high=1,factor=2
rope:scaling=linear,factor=2,truncate_low=0  xpos:decay=0.9,gamma=1  forgetting:longest=9
dape:base=alibi,rotary_fraction=0.5  bipe:factor=3  bipe:inter=alibi,base=500  bipe:intra=sinusoidal,max_intra=9
longrope:original_length=64,factors=2,attention=none,factor=4  longrope:original_length=64,start_tokens=8
longrope:original_length=64,short=scaled  longrope:original_length=64,attention=yarn
rerope:window=4,original_length=9  lm_infinite:window=5,original_length=9  streaming_llm:recent=5,original_length=9
dual_chunk:chunk=4,cap=6,original_length=9
"""
# what the value of the last option of each must be
LIMITS = {
    "at least 1": "window:window=0  longrope:factor=0.5  clex:original_length=4,steps=0  leaky_rerope:leak=0.5",
    "at least 2": "cope:max_positions=1",
    "at most 2": "kerple_power:p=2.5",
    "more than 0": "rope:scaling=linear,factor=0  rope:scaling=linear,factor=-2  rope:rotary_fraction=0  xpos:gamma=0",
    "more than 0.01": "kerple_log:p=0",
    "more than 1": "rope:base=1",
    "one of heads, paper": "type1:form=pape",
    "one of 0, 1, 2": "fire:hidden_layers=3",
    "one of none, clipped, plain": "rope:logn=often",
    "one of none, linear.*did you mean 'yarn'": "rope:scaling=yar",
    "one of kerple_log": "dape:base=t5_bias",
    "a number or auto, not 'much'": "rope:scaling=linear,factor=much",
    "wants numbers as in 1.1.5.3.4, or one of pi, ntk, yarn, not": "longrope:factors=1+much  longrope:factors=nan",
}
OTHERS = {
    "typ1": "unknown encoding 'typ1' .did you mean 'type1'.*known: alibi, .*--rpe-module",
    "sandwich:dim=7": "must be even",
    "t5_bias:max_distance=16": "more than buckets/2 = 16",
    "t5_bias:variant=clipped,max_distance=64": r"clipped.*ends at distance buckets-1 = 31.*max_distance=64",
    **{f"rope:scaling={s}": "needs factor=NUMBER" for s in ("linear", "ntk", "ntk_by_parts", "yarn", "truncated")},
    "rope:scaling=dynamic_ntk,factor=auto": "its factor, alpha, is a number",
    "rope:scaling=dynamic_ntk": LENGTH,
    "rope:scaling=linear,factor=auto": LENGTH,
    "rope:logn=clipped": LENGTH,
    "rope:logn=plain,original_length=1": "ln L for logn, which is 0 for L = 1",
    SCALED.format("yarn") + ",beta_fast=1": "beta_fast=1 must be more than beta_slow=1",
    SCALED.format("llama3") + ",beta_slow=4": "beta_fast=4 must be more than beta_slow=4",
    SCALED.format("truncated") + ",truncate_low=2": "truncate_low=2 is above 0.349",
    SCALED.format("yarn") + ",scaled=turned,logn=plain": "leave scaled=turned out",
    "rope:scaling=truncated,truncate_high=1,truncate_low=2": "truncate_low=2 is above 1",
    "rope:rotary_fraction=0.4": "even and at least 2, not 3",
    "xpos:decay=1": "use that, or a decay below 1",
    "longrope:factors=1+2": "has 2 numbers where 4 pairs turn: give 4, or one",
    "longrope:factors=1+2+3+2.5": "must never shrink: 3 is followed by 2.5",
    "longrope:factors=0.9+1+1+1": "must be at least 1, not 0.9",
    "longrope:factors=inf": "wants numbers",
    "longrope:factors=2,original_length=1": "at least 2 tokens",
    "longrope:factors=ntk": "needs factor=NUMBER",
    "longrope:factors=yarn,factor=2,short=scaled": LENGTH,
    "longrope:factors=2": LENGTH,
    "longrope:factor=2": LENGTH,
    "clex": f"'clex' needs the original length: {LENGTH}",
    "music": "'music' needs a number of distances: give max_distance=N or a training length",
    "deberta:buckets=3": "buckets=3 must be 4 to below max_distance=512",
    "deberta:c2p=false,p2c=none": "has no positions: use 'nope'",
    "forgetting:gate=bias,shortest=9,longest=3": "shortest=9 is more than longest=3",
    "self_extend:group=3,window=4": "group=3 does not divide window=4: change one of them",
    "self_extend": f"takes window from the original length: give window=N or {LENGTH.removeprefix('give ')}",
    "dual_chunk:chunk=5": "takes cap from the original length: give cap=N",
    "dual_chunk:chunk=9,cap=8": "cap=8 is less than chunk=9: raise cap or lower chunk",
    "streaming_llm:original_length=4": "4 sinks leave no room in 4 tokens: give recent=N",
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
        *((spec, 4, 36, None, "rotated width must be even and at least 2, not 9") for spec in ("rope", "xpos")),
        *(
            (f"{name}:max_positions=10", 4, 32, 64, "shorter than the training length 64")
            for name in ("learned", "tupe")
        ),
    ],
)
def test_refusals_of_a_shape(spec, heads, width, length, words):
    with refused(words):
        build(spec, heads, width, length)


def test_half_of_an_odd_head_may_turn():
    build("rope:rotary_fraction=0.5", 4, 36)
