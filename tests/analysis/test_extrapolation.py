"""Definition 0.1 on the published perplexities and on made-up ones."""

from __future__ import annotations

import pytest

from fairseq_rpe.analysis.extrapolation import deviation
from fairseq_rpe.core import UserError
from fairseq_rpe.sweeps import recipes

PUBLISHED = recipes.load("extrapolation-wikitext103").published.values


def published(name: str):
    return deviation({int(n): v for n, v in PUBLISHED[name].items()}, 512)


def test_signs_and_sides():
    up_and_down = deviation({64: 50.0, 128: 55.0, 256: 40.0, 32: 900.0}, 64)
    assert (up_and_down.largest, up_and_down.worst, up_and_down.end) == pytest.approx((0.2, 0.1, -0.2))
    assert up_and_down.extrapolates(0.2001) and not up_and_down.extrapolates(0.2)
    assert up_and_down.extrapolates(0.11, one_sided=True) and not up_and_down.extrapolates(0.1, one_sided=True)
    falling = deviation({64: 50.0, 128: 45.0}, 64)
    assert (falling.worst, falling.end) == (0.0, pytest.approx(-0.1))


def test_published_methods_improve_by_a_tenth_and_divergent_series_do_not():
    for name in ("alibi", "kerple_log", "kerple_power", "sandwich", "type1", "type2"):
        found = published(name)
        assert 0.06 < found.largest < 0.11 and found.worst == 0 and found.end < 0
        assert not found.extrapolates(0.05) and found.extrapolates(0.05, one_sided=True)
    assert published("inv_nlnn").largest == pytest.approx(0.121, abs=5e-4)
    assert published("inv_n").largest == pytest.approx(1.37, abs=5e-3) and published("sinusoidal").end > 16


def test_refusals():
    with pytest.raises(UserError, match="no perplexity at the training length of 64"):
        deviation({128: 50.0}, 64)
    with pytest.raises(UserError, match="no perplexity beyond the training length of 64"):
        deviation({64: 50.0, 32: 60.0}, 64)
