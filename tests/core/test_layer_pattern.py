"""Patterns of layers: parsing, printing, expanding, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused

from fairseq_rpe.core.layer_pattern import (
    LayerGroup,
    LayerPattern,
    format_layers,
    is_pattern,
    normalise_pattern,
    parse_pattern,
    refuse_pattern,
)

SPECS = st.sampled_from(["rope", "nope", "alibi", "rope:local=128,base=500000", "t5_bias:variant=log"])
ENDS = st.just("") | SPECS
PATTERNS = st.builds(LayerPattern.reduced, st.lists(SPECS, min_size=1, max_size=12), ENDS, ENDS)


@given(PATTERNS)
def test_parsing_what_is_printed_returns_the_pattern(pattern):
    assert parse_pattern(str(pattern)) == pattern
    assert normalise_pattern(str(pattern), str) == str(pattern)
    assert is_pattern(str(pattern)) == (len(pattern.specs) > 1)


@given(st.lists(SPECS, min_size=1, max_size=6), ENDS, ENDS, st.integers(1, 4), st.integers(0, 20))
def test_reduction_changes_no_layer(period, start, end, repeats, more):
    pattern, plain = LayerPattern.reduced(period * repeats, start, end), LayerPattern(tuple(period), start, end)
    layers = len(period) + 2 + more  # enough for all parts to be used
    assert pattern.expand(layers) == plain.expand(layers)
    assert len(pattern.period) <= len(period)


@given(PATTERNS, PATTERNS, st.integers(26, 60))
def test_pairs_are_those_that_meet_in_some_layer(first, second, layers):
    met = set(zip(first.expand(layers), second.expand(layers), strict=True))
    assert met <= set(first.pairs(second))
    if not first.end and not second.end:
        assert set(first.pairs(second)) == set(zip(first.expand(200), second.expand(200), strict=True))


CANONICAL = {
    "rope|rope|nope": "2*rope|nope",
    " 1*rope | 2 * nope ": "rope|2*nope",
    "rope|nope|rope|nope": "rope|nope",
    "2*rope|rope": "rope",
    "start=nope|rope|end=alibi": "start=nope|rope|end=alibi",
    "end=alibi|rope|start=nope": "start=nope|rope|end=alibi",
    "start=rope|rope|nope": "rope|nope",
    "nope|end=nope": "nope",
    "nope|rope|end=nope": "nope|rope|end=nope",
    "rope:base=500000,local=128": "rope:base=500000,local=128",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_form(text):
    assert normalise_pattern(text, str) == CANONICAL[text]


def test_parts_have_the_layers_of_the_published_patterns():
    assert parse_pattern("3*rope:block=8192|nope").groups(10) == (
        LayerGroup("rope:block=8192", (0, 1, 2, 4, 5, 6, 8, 9)),
        LayerGroup("nope", (3, 7)),
    )
    last_is_global = parse_pattern("5*rope:local=512|rope|end=rope").expand(8)
    assert [layer for layer, spec in enumerate(last_is_global) if spec == "rope"] == [5, 7]
    assert parse_pattern("start=nope|alibi").groups(3) == (LayerGroup("nope", (0,)), LayerGroup("alibi", (1, 2)))
    assert format_layers((0, 1, 2, 4, 5, 6, 8, 9)) == "0-2, 4-6, 8-9"
    assert format_layers([3]) == "3"


REFUSED = {
    "|": "a part is empty",
    "rope|": "a part is empty",
    "3*|rope": "a part is empty",
    "start=|rope": "a part is empty",
    "2*3*rope": "'3\\*rope' is no encoding",
    "start=2*rope|nope": "'2\\*rope' is no encoding",
    "2*start=rope|nope": "'start=rope' is no encoding",
    "0*rope|nope": "a number from 1 to 1024",
    "1000*rope|1000*nope": "a number from 1 to 1024",
    "9999999999999999999*rope": "a number from 1 to 1024",
    "start=rope": "names only the first or last layer",
    "start=rope|start=nope|alibi": "two parts start=",
    "end=rope|alibi|end=rope": "two parts end=",
}


@pytest.mark.parametrize("text", REFUSED)
def test_malformed_patterns_are_refused(text):
    with refused(REFUSED[text]):
        parse_pattern(text)


@pytest.mark.parametrize(
    ("text", "layers", "message"),
    [
        ("3*rope|nope", 3, "more layers than the 3 of the model: its part 'nope' is never used"),
        ("rope|nope|2*rope", 3, "it repeats after 4 layers"),
        ("start=nope|rope", 1, "its part 'rope' is never used"),
        ("start=alibi|nope|rope", 2, "its part 'nope' is never used"),
        ("start=alibi|rope|end=nope", 1, "its part 'alibi' is never used"),
    ],
)
def test_a_part_that_no_layer_has_is_refused(text, layers, message):
    with refused(message):
        parse_pattern(text).expand(layers)


def test_a_command_that_takes_one_encoding_is_named():
    refuse_pattern("rope:base=500000", "longrope-search")
    with refused("'2\\*rope\\|nope' is a pattern of layers, and longrope-search takes one encoding"):
        refuse_pattern("2*rope|nope", "longrope-search")
