"""Raw attention, sensitivity and total difference of the paper on index warping."""

from __future__ import annotations

import math

import pytest
import torch
from refusal import refused

from fairseq_rpe.analysis import alibi_raw, rope_raw, sensitivity, total_difference
from fairseq_rpe.analysis.index_warping import cosine_integral

DISTANCES = torch.tensor([0, 1, 2, 10, 511, 9215])


def difference(skew, length: int, times: int, reach: int, **how) -> float:
    return total_difference(skew, length, times * length, reach, **how)


def test_rope_golden():
    for width, values in (
        (64, [1, 0.966151, 0.884496, 0.657863, 0.200753, -0.137926]),
        (128, [1, 0.970214, 0.896592, 0.669063, 0.211428, -0.079268]),
    ):
        assert rope_raw(DISTANCES, width).tolist() == pytest.approx(values, abs=1e-6)


def test_alibi():
    assert alibi_raw(DISTANCES[:4]).tolist() == [1, 0.5, 0, -4]
    assert alibi_raw(torch.tensor(256), head=8).item() == 0


def test_cosine_integral():
    values = {1e-6: -13.238294893063, 0.5: -0.177784078807, 1.0: 0.337403922901, 4.0: -0.140981697887}
    values |= {4.5: -0.193491122102, 10.0: -0.045456433004, 1e4: -0.000030551917}
    found = cosine_integral(torch.tensor(list(values), dtype=torch.float64))
    assert found.tolist() == pytest.approx(list(values.values()), abs=2e-12)


def test_the_limit_of_wide_heads():
    n = torch.tensor([0.0, 0.3, 1.0, 17.0, 511.0], dtype=torch.float64)
    assert rope_raw(n).tolist() == pytest.approx(rope_raw(n, 2**18).tolist(), abs=1e-4)
    assert rope_raw(torch.tensor([0.0, 1e-300], dtype=torch.float64)).tolist() == pytest.approx([1, 1])
    far = torch.arange(0, 200_000, 97)
    assert rope_raw(far).min() > -1  # exp(raw) of RoPE never falls below 1/e, that of ALiBi vanishes
    assert alibi_raw(far).exp().min() == 0


def test_sensitivity():
    raw = rope_raw(torch.tensor([0.0, 0.5, 2.0]))
    got = sensitivity(torch.tensor([0.0, 0.5, 2.0]))
    assert got.tolist() == pytest.approx([(raw[0] - raw[1]).item(), (raw[1] - raw[2]).item()])
    assert (sensitivity(torch.arange(5), alibi_raw) == 0.5).all()
    both = sensitivity(torch.arange(3), alibi_raw, exponential=True)
    assert both.tolist() == pytest.approx([math.e - math.exp(0.5), math.exp(0.5) - 1])


def test_total_difference_by_hand():
    """ALiBi falls by k a token: k in training against k·L_train/L_test, for each of c + 1 terms."""
    assert difference("none", 20, 4, 10, raw=alibi_raw) == pytest.approx(11 * 0.5 * (1 - 1 / 4))
    assert difference("none", 20, 1, 10) == pytest.approx(0, abs=1e-12)
    assert difference(lambda x: x, 20, 2, 10) == difference("none", 20, 2, 10)
    assert difference("beta", 20, 2, 3) < difference("beta", 20, 2, 10)


def test_table_2_nearly_for_500():
    """With wide heads, c = 200 and exp(raw), as the paper draws it, the row comes out within 15 %."""
    table = {"none": (0.061, 0.066), "sqrt": (0.028, 0.031), "beta": (0.031, 0.013)}  # at 2 and 4 times the length
    for skew, published in table.items():
        got = [difference(skew, 500, k, 200, exponential=True) for k in (2, 4)]
        assert got == pytest.approx(published, rel=0.15)


def test_equation_9_taken_literally_for_20():
    """What the equations give; the paper's row of 20 is reproduced by no head width."""
    for width, values in (
        (None, {"none": (0.0686, 0.0829), "sqrt": (0.0110, 0.0397), "beta": (0.0302, 0.0082)}),
        (128, {"none": (0.0722, 0.0822), "sqrt": (0.0167, 0.0508), "beta": (0.0375, 0.0201)}),
    ):
        for skew, expected in values.items():
            got = [difference(skew, 20, k, 10, raw=lambda n, width=width: rope_raw(n, width)) for k in (2, 4)]
            assert got == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: total_difference("bata", 20, 40, 10), "unknown skew 'bata'.*did you mean 'beta'.*none, beta, sqrt"),
        (lambda: total_difference("beta", 40, 20, 10), "test length of 20 is shorter than the training length 40"),
        (
            lambda: total_difference("beta", 20, 40, 20),
            "tail of 20 tokens exceeds the training length 20: choose 0 to 19",
        ),
        (lambda: rope_raw(DISTANCES, 7), "even number of dimensions wide, not 7"),
        (lambda: alibi_raw(DISTANCES, head=9), "head 9 does not exist: heads count from 1 to 8"),
    ],
)
def test_bad_input_is_one_line(call, words):
    with refused(words):
        call()
