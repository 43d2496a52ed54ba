"""What is read of a spec of positions without torch is what the transform itself says."""

from __future__ import annotations

import sys

import pytest
from conftest import run

from fairseq_rpe import positions
from fairseq_rpe.evaluation.position_limits import is_random, max_length
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


def test_without_torch():
    run(sys.executable, "-c", "import sys, fairseq_rpe.evaluation.position_limits; sys.exit('torch' in sys.modules)")
