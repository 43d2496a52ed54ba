"""TISA, TUPE and complex embeddings against their equations in numpy, and what each of them refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numeric import exact, vectors
from refusal import refused

from fairseq_rpe import attend
from fairseq_rpe.analysis.convergence import DIVERGES, verdict
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

SHAPES = [(1, 1, 4), (2, 3, 8), (2, 7, 12), (3, 5, 6), (4, 19, 16)]  # heads, tokens, model width


def built(spec: str, heads: int, width: int, length: int | None = None, **more):
    torch.manual_seed(0)
    made = build(spec, heads, width, length, **more).double()
    for p in made.parameters():  # not where they start: zeros and equal rows hide mistakes
        torch.nn.init.normal_(p)
    return made, {name: p.detach().numpy() for name, p in made.named_parameters()}


@pytest.mark.parametrize(("heads", "n", "width"), SHAPES)
def test_tisa_is_its_equation(heads, n, width):
    made, p = built("tisa:kernels=3", heads, width)
    a, b, c = (p[name][..., None] for name in ("amplitudes", "sharpness", "offsets"))

    def expected(d):
        return (a * np.exp(-np.abs(b) * (c + d) ** 2)).sum(0)

    np.testing.assert_allclose(made.bias_profile(n).numpy(), expected(np.arange(n)), rtol=1e-12)
    free = Positions(*[torch.arange(n).double()[None] / 3] * 2, None, False)
    got = made.position_bias(free).materialize(free)[0, :, -1].flip(-1).detach().numpy()
    np.testing.assert_allclose(got, expected(np.arange(n) / 3))


def test_tisa_start():
    torch.manual_seed(0)
    fresh = build("tisa:kernels=256", 8, 64)
    assert [tuple(x.shape) for x in fresh.parameters()] == [(256, 8)] * 3 and fresh.sharing_modes[0] == "layer"
    for x, mean, spread in ((fresh.amplitudes, 0.1, 0.01), (fresh.sharpness, 0.1, 0.01), (fresh.offsets, 0.0, 5.0)):
        assert float(x.detach().mean()) == pytest.approx(mean, abs=spread / 10)
        assert float(x.detach().std()) == pytest.approx(spread, rel=0.05)


def test_tisa_watches_and_diverges():
    made = build("tisa", 4, 16)
    assert made.logged_scalars()["tisa_here"].tolist() == pytest.approx(made.bias_profile(1)[:, 0].tolist())
    assert torch.equal(made.logged_scalars()["tisa_amplitude"], made.amplitudes.sum(0))
    with torch.no_grad():
        made.amplitudes.copy_(-made.amplitudes)
    assert all(head.decision == DIVERGES and "bounded below" in head.reason for head in verdict(made))
    low = [float(eval(weight.formula)) for weight in made.log_bias_formulas()]
    assert low == pytest.approx(made.amplitudes.sum(0).tolist())
    assert (made.bias_profile(50).amin(1) >= torch.tensor(low, dtype=torch.float64) - 1e-12).all()


def tupe_in_numpy(p, heads: int, width: int, n: int, norm: bool, relative: bool) -> np.ndarray:
    x = p["table"][:n]
    if norm:
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        x = x * p["norm.weight"] + p["norm.bias"]
    both = x @ p["project.weight"].T + p["project.bias"]
    found, size = np.zeros((heads, n, n)), width // heads
    for h in range(heads):
        cut = slice(h * size, (h + 1) * size)
        found[h] = both[:, :width][:, cut] @ both[:, width:][:, cut].T / math.sqrt(2 * size)
    if relative:
        for i, j in zip(*np.tril_indices(n), strict=True):
            far = 16 + int(math.log(max(i - j, 1) / 16) / math.log(128 / 16) * 16) if i - j >= 16 else i - j
            found[:, i, j] += p["relative"][min(far, 31)]
    return found


@pytest.mark.parametrize("options", ["norm=true", "norm=false,relative=true", "norm=true,relative=true"])
@pytest.mark.parametrize(("heads", "n", "width"), SHAPES)
def test_tupe_is_its_equation(heads, n, width, options):
    made, p = built(f"tupe:{options}", heads, width, n)
    norm, relative = "norm=true" in options, "relative=true" in options
    expected = np.tril(tupe_in_numpy(p, heads, width, n, norm, relative))
    pos = exact(n)
    whole = made.position_bias(pos).materialize(pos)[0].detach()
    np.testing.assert_allclose(whole.tril().numpy(), expected, rtol=1e-9, atol=1e-12)
    for first in range(n):  # few queries go another way, which projects no key
        some = Positions(pos.k[:, first:], pos.k)
        torch.testing.assert_close(
            made.position_bias(some).materialize(some)[0].tril(first), whole[:, first:].tril(first)
        )
    torch.testing.assert_close(made.bias(pos.q, pos.k)[0], whole)
    rows = torch.stack([pos.k[0], (pos.k[0] - 2).clamp_min(0)])  # two rows, each with positions of its own
    two = made.position_bias(own := Positions(rows, rows, 1.0, False)).materialize(own)
    torch.testing.assert_close(two[0], whole)
    torch.testing.assert_close(two[1, :, 2:, 2:], whole[:, : max(n - 2, 0), : max(n - 2, 0)])


def test_tupe_scales_contents_too():
    """Nothing is learned here: content alone, by 1/sqrt(2D)."""
    made, (q, k, v) = built("tupe:norm=false", 1, 4, 5)[0], vectors(1, 1, 5, 4)
    torch.nn.init.zeros_(made.table), torch.nn.init.zeros_(made.project.bias)
    expected = (q[0, 0, 4] @ k[0, 0].T / math.sqrt(8)).softmax(0) @ v[0, 0]
    torch.testing.assert_close(attend(q, k, v, made)[0, 0, 4], expected)
    assert {"tupe_last"} == set(build("tupe:relative=true", 4, 32, length=8).logged_scalars())


@pytest.mark.parametrize("frequencies", ["word", "dimension"])
@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
def test_complex_is_its_equation(rows, n, width, frequencies):
    made, p = built(f"complex:frequencies={frequencies}", 1, width, symbols="abcdefghi")
    x, ids, at = torch.randn(rows, n, width, dtype=torch.float64), torch.randint(9, (rows, n)), exact(n).q
    got = made.embed(x, Positions(at, at, tokens=ids)).detach().numpy()
    omega = p["frequencies"][ids.numpy()] if frequencies == "word" else p["frequencies"]  # (rows, n, pairs) or (pairs,)
    z = (x[..., : width // 2] + 1j * x[..., width // 2 :]).numpy() * np.exp(1j * omega * np.arange(n)[:, None])
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), rtol=1e-9, atol=1e-12)


def test_complex_start_and_gradients_of_the_words_that_are_there():
    made = build("complex", 2, 8, symbols="abcd")
    start = torch.tensor([10000 ** (-2 * c / 8) for c in range(4)])
    torch.testing.assert_close(made.frequencies.detach(), start.expand(4, -1))
    pos = Positions(torch.arange(3.0)[None], torch.arange(3.0)[None], tokens=torch.tensor([[1, 1, 3]]))
    made.embed(torch.randn(1, 3, 8), pos).square().mul(torch.arange(8)).sum().backward()
    assert made.frequencies.grad.abs().sum(1).ne(0).tolist() == [False, True, False, True]


def test_complex_refuses_and_is_filled_from_a_checkpoint():
    pos = Positions.arange(3)
    with refused("'complex' reads the tokens.*complex:frequencies=dimension"):
        build("complex", 2, 8, symbols="abc").embed(torch.zeros(1, 3, 8), pos)
    empty, made = build("complex", 2, 8), build("complex", 2, 8, symbols="abc")
    known = Positions(pos.q, pos.k, tokens=torch.tensor([[0, 2, 1]]))
    with refused("does not know the dictionary"):
        empty.embed(torch.zeros(1, 3, 8), known)
    with torch.no_grad():
        made.frequencies.normal_()
    empty.load_state_dict(made.state_dict())
    x = torch.randn(1, 3, 8)
    assert torch.equal(empty.embed(x, known), made.embed(x, known))
    with pytest.raises(RuntimeError, match="size mismatch"):
        build("complex", 2, 8, symbols="ab").load_state_dict(made.state_dict())
