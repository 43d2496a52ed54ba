"""What is read of a spec of positions without torch is what the transform itself says."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from conftest import run

from fairseq_rpe import encodings, positions
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings import registry as encoding_registry
from fairseq_rpe.evaluation.position_limits import LIMITED_ENCODINGS, is_random, length_within, max_length, method_limit
from fairseq_rpe.positions import registry

SPECS = [
    *positions.names(),
    "randomized:times=3",
    "randomized:max_position=77,per=row",
    "randomized:max_position=none,times=2",
]
SPECS += ["pose:target=900,chunks=3", "random_padding:max_position=80", "warp:length=train", "interpolate:ratio=1/4"]


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_what_the_transform_says(spec):
    made = positions.build(spec, 64)
    assert (max_length(spec, 64), is_random(spec)) == (made.max_length, registry.get(spec.partition(":")[0]).random)


@pytest.mark.parametrize(
    "spec", [None, "my_own:max_position=3", "randomized:max_position=some", "randomized:times=x", "pose:", ":"]
)
def test_nothing_is_known_of_others(spec):
    assert max_length(spec, 64) is None


def test_users_transforms_are_known_once_they_are_registered(monkeypatch):
    @dataclass(frozen=True)
    class Config:
        rows: int = positions.option(9, "number of positions")

    class Mine(positions.Transform):
        random = True

        @classmethod
        def position_limit(cls, config, train_length):
            return config.rows

    Mine.Config = Config
    monkeypatch.setitem(registry._table, "my_own", Mine)
    assert (max_length("my_own:rows=3", 64), is_random("my_own")) == (3, True)
    assert Mine(Config(4)).max_length == 4


@pytest.mark.parametrize(
    ("rpe", "positions_eval", "limit"),
    [
        ("learned", None, 64),
        ("3*alibi|learned:max_positions=90", "randomized:max_position=80", 80),
        ("tupe:max_positions=90|rope", None, 90),
        ("learned", "offset:tokens=10", 54),
        ("learned", "shape:max_position=10", 55),
        ("learned", "randomized:max_position=65", 0),
        ("alibi", None, None),
        ("my_own:x=3", None, None),
    ],
)
def test_limit_of_a_method(rpe, positions_eval, limit):
    assert method_limit(rpe, positions_eval, 64) == limit


@pytest.mark.parametrize("spec", ["identity", "offset:tokens=7", "shape:max_position=4", "randomized:max_position=20"])
def test_positions_of_a_row_are_within_the_table(spec):
    """The last position of many drawn rows of the longest length, and of one token more, of a table of 20 rows."""
    transform, rows = positions.build(spec, 8), 20
    longest = length_within(spec, 8, rows)
    last = []
    for length in {longest, min(longest + 1, transform.max_length or rows + 1)}:
        index, lengths = torch.arange(float(length))[None], torch.full((200,), length)
        last.append(int(transform(index, lengths, torch.Generator().manual_seed(1)).k.max()))
    assert last[0] == rows - 1 and (len(last) == 1 or last[1] == rows)


def test_all_encodings_with_a_limit_are_known():
    classes = {name: encoding_registry.get(name) for name in encodings.names()}
    limited = [n for n, c in classes.items() if c.position_limit.__func__ is not Encoding.position_limit.__func__]
    assert sorted(limited) == sorted(LIMITED_ENCODINGS)
    for name in limited:
        for spec in (name, f"{name}:max_positions=90"):
            cls, _, config = encoding_registry.resolve(spec)
            assert method_limit(spec, None, 64) == cls.position_limit(config, 64)


def test_without_torch():
    code = "import sys\nfrom fairseq_rpe.evaluation.position_limits import is_random, max_length\n"
    code += f"print([(max_length(spec, 64), is_random(spec)) for spec in {SPECS}])\nsys.exit('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).stdout.strip() == str([(max_length(s, 64), is_random(s)) for s in SPECS])
