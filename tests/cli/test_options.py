"""What the options of several commands make of a text, and what their help says."""

from __future__ import annotations

import os

import pytest

from fairseq_rpe.cli.main import build_parser
from fairseq_rpe.cli.options import by_arch, make_ready, words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("alibi rope", ("alibi", "rope")),
        ("alibi, rope", ("alibi", "rope")),
        ("alibi,rope", ("alibi", "rope")),
        ("alibi , rope,", ("alibi", "rope")),
        ("type1:form=paper, rope:base=5,factor=4 nope", ("type1:form=paper", "rope:base=5,factor=4", "nope")),
        ("alibi,rope:scaling=linear,factor=4, t5_bias", ("alibi", "rope:scaling=linear,factor=4", "t5_bias")),
        (" , ", ()),
    ],
)
def test_specs_are_separated_by_blanks_or_commas(text, found):
    assert words(text) == found


def test_the_help_has_the_defaults_of_the_architectures():
    assert by_arch("tokens") == "default: 64 for tiny, else 512"
    assert by_arch("updates") == "default: 400 for tiny, else 50000; tasks: 3000 for tiny, else 40000"
    assert by_arch("dropout") == "default: 0.0 for tiny, else 0.1"
    assert by_arch("batch_sentences") == "default: 16 for tiny, else 128; tasks: 64"
    for command in ("train", "sweep"):
        [commands] = [a.choices for a in build_parser(command)._actions if isinstance(a.choices, dict)]
        shown = " ".join(commands[command].format_help().split())
        for name in ("tokens", "updates", "batch_sentences", "lr", "warmup", "schedule", "dropout"):
            assert by_arch(name) in shown, name


@pytest.mark.parametrize(
    "words", [("train", "DATA", "--rpe", "x", "--save-dir", "y"), ("eval", "C", "D", "--lengths", "8"), ("sweep", "D")]
)
def test_no_cache_holds_for_what_a_command_starts_too(words, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_RPE_CACHE", "somewhere")
    make_ready(build_parser(words[0]).parse_args(words))
    assert os.environ["FAIRSEQ_RPE_CACHE"] == "somewhere"
    make_ready(build_parser(words[0]).parse_args([*words, "--no-cache"]))
    assert os.environ["FAIRSEQ_RPE_CACHE"] == "off"
