"""TISA, TUPE and complex embeddings against their equations in numpy, and what each of them refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fairseq_rpe import attend
from fairseq_rpe.analysis.convergence import DIVERGES, verdict
from fairseq_rpe.core import Positions, UserError, block
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.complex import Complex

SHAPES = [(1, 1, 4), (2, 3, 8), (2, 7, 12), (3, 5, 6), (4, 19, 16)]  # heads, tokens, model width


def built(spec: str, heads: int, width: int, length: int | None = None, **more):
    torch.manual_seed(0)
    made = build(spec, heads, width, length, **more).double()
    for p in made.parameters():  # not where they start: zeros and equal rows hide mistakes
        torch.nn.init.normal_(p)
    return made, {name: p.detach().numpy() for name, p in made.named_parameters()}


# --- TISA ---


@pytest.mark.parametrize(("heads", "n", "width"), SHAPES)
def test_tisa_is_its_equation(heads, n, width):
    made, p = built("tisa:kernels=3", heads, width)
    a, b, c = (p[name] for name in ("amplitudes", "sharpness", "offsets"))
    expected = np.zeros((heads, n))
    for h in range(heads):
        for d in range(n):
            expected[h, d] = sum(a[r, h] * math.exp(-abs(b[r, h]) * (c[r, h] + d) ** 2) for r in range(3))
    np.testing.assert_allclose(made.profile(n).numpy(), expected, rtol=1e-12)
    free = Positions(*[torch.arange(n).double()[None] / 3] * 2, None, False)
    got = block(made.form(free), free)[0, :, -1].flip(-1).detach().numpy()
    thirds = np.arange(n)[None, None] / 3
    np.testing.assert_allclose(
        got, (a[..., None] * np.exp(-np.abs(b)[..., None] * (c[..., None] + thirds) ** 2)).sum(0)
    )


def test_tisa_golden_and_start():
    made = build("tisa:kernels=2", 1, 4).double()
    with torch.no_grad():
        for x, values in zip(made.parameters(), ([0.1, 0.2], [0.5, -0.05], [0.0, -3.0]), strict=True):
            x.copy_(torch.tensor(values, dtype=torch.float64)[:, None])
    golden = [0.2275256303, 0.2243992166, 0.2037794132, 0.2011108997, 0.1902794312]
    assert made.profile(5)[0].tolist() == pytest.approx(golden, abs=1e-10)
    torch.manual_seed(0)
    fresh = build("tisa:kernels=256", 8, 64)
    assert [tuple(x.shape) for x in fresh.parameters()] == [(256, 8)] * 3 and fresh.shares[0] == "layer"
    for x, mean, spread in ((fresh.amplitudes, 0.1, 0.01), (fresh.sharpness, 0.1, 0.01), (fresh.offsets, 0.0, 5.0)):
        x = x.detach()
        assert float(x.mean()) == pytest.approx(mean, abs=spread / 10)
        assert float(x.std()) == pytest.approx(spread, rel=0.05)


def test_tisa_watches_and_diverges():
    made = build("tisa", 4, 16)
    found = made.scalars()
    assert found["tisa_here"].tolist() == pytest.approx(made.profile(1)[:, 0].tolist())
    assert torch.equal(found["tisa_amplitude"], made.amplitudes.sum(0))
    with torch.no_grad():
        made.amplitudes.copy_(-made.amplitudes)
    assert all(head.decision == DIVERGES and "bounded below" in head.reason for head in verdict(made))
    low = [float(eval(weight.formula)) for weight in made.series()]
    assert low == pytest.approx(made.amplitudes.sum(0).tolist())
    assert (made.profile(50).amin(1) >= torch.tensor(low, dtype=torch.float64) - 1e-12).all()


# --- TUPE ---


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
            for i in range(n):
                for j in range(i + 1):
                    d = i - j
                    far = 16 + int(math.log(max(d, 1) / 16) / math.log(128 / 16) * 16) if d >= 16 else d
                    found[h, i, j] += p["relative"][min(far, 31), h]
    return found


@pytest.mark.parametrize(("norm", "relative"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("heads", "n", "width"), SHAPES)
def test_tupe_is_its_equation(heads, n, width, norm, relative):
    spec = f"tupe:norm={str(norm).lower()},relative={str(relative).lower()}"
    made, p = built(spec, heads, width, n)
    expected = np.tril(tupe_in_numpy(p, heads, width, n, norm, relative))
    pos = Positions.arange(n, dtype=torch.float64)
    whole = block(made.form(pos), pos)[0].detach()
    np.testing.assert_allclose(whole.tril().numpy(), expected, rtol=1e-9, atol=1e-12)
    for first in range(n):  # few queries go another way, which projects no key
        some = Positions(pos.k[:, first:], pos.k)
        torch.testing.assert_close(block(made.form(some), some)[0].tril(first), whole[:, first:].tril(first))
    torch.testing.assert_close(made.bias(pos.q, pos.k)[0], whole)
    rows = torch.stack([pos.k[0], (pos.k[0] - 2).clamp_min(0)])  # two rows, each with positions of its own
    two = block(made.form(own := Positions(rows, rows, 1.0, False)), own)
    torch.testing.assert_close(two[0], whole)
    torch.testing.assert_close(two[1, :, 2:, 2:], whole[:, : n - 2, : n - 2] if n > 2 else two[1, :, 2:, 2:])


def test_tupe_golden_through_attend():
    f = torch.arange(20).double()
    q, k, v = (x.view(1, 1, 5, 4) for x in (torch.sin(1 + f), torch.cos(1 + f), torch.sin((1 + f) / 2)))
    made, _ = built("tupe:norm=false", 1, 4, 5)
    with torch.no_grad():
        made.table.copy_(0.5 * torch.cos(0.7 * (1 + f)).view(5, 4))
        made.project.weight.copy_(torch.cat([torch.eye(4)] * 2))
        made.project.bias.zero_()
    golden = torch.tensor([-0.3129734155, -0.4451270763, 0.9449538098, -0.8709208408, 0.2956343223]).double()
    got = attend(q, k, v, made, positions=Positions.arange(5, dtype=torch.float64))[0, 0, 4]
    torch.testing.assert_close(got, golden.softmax(0) @ v[0, 0], rtol=0, atol=1e-6)
    with torch.no_grad():  # nothing learned: content alone, by 1/sqrt(2D)
        made.table.zero_()
    expected = (q[0, 0, 4] @ k[0, 0].T / math.sqrt(8)).softmax(0) @ v[0, 0]
    torch.testing.assert_close(attend(q, k, v, made)[0, 0, 4], expected)


def test_tupe_refuses_what_it_cannot_know():
    with pytest.raises(UserError, match="'tupe' needs a table size"):
        build("tupe", 4, 32)
    with pytest.raises(UserError, match="shorter than the training length 64"):
        build("tupe:max_positions=10", 4, 32, length=64)
    made = build("tupe", 4, 32, length=8)
    made.form(Positions.arange(8))
    for pos in (Positions.arange(9), Positions.arange(1, 9)):
        with pytest.raises(UserError, match="position 8 is beyond the 8 positions that 'tupe'"):
            made.form(pos)
    assert {"tupe_last"} == set(build("tupe:relative=true", 4, 32, length=8).scalars())


# --- complex embeddings ---


@pytest.mark.parametrize("frequencies", ["word", "dimension"])
@pytest.mark.parametrize(("rows", "n", "width"), SHAPES)
def test_complex_is_its_equation(rows, n, width, frequencies):
    words = [f"w{i}" for i in range(9)]
    made, p = built(f"complex:frequencies={frequencies}", 1, width, symbols=words)
    x = torch.randn(rows, n, width, dtype=torch.float64)
    ids = torch.randint(9, (rows, n))
    at = torch.arange(n).double()[None]
    got = made.embed(x, Positions(at, at, tokens=ids)).detach().numpy()
    for b in range(rows):
        for t in range(n):
            omega = p["frequencies"][ids[b, t]] if frequencies == "word" else p["frequencies"]
            z = (x[b, t, : width // 2] + 1j * x[b, t, width // 2 :]).numpy()
            turned = np.abs(z) * np.exp(1j * (np.angle(z) + omega * t))
            np.testing.assert_allclose(got[b, t], np.concatenate([turned.real, turned.imag]), rtol=1e-9, atol=1e-12)


def test_complex_golden_and_start():
    made = build("complex:frequencies=dimension", 1, 2)
    with torch.no_grad():
        made.frequencies.fill_(0.5)
    x = (2 * torch.tensor([math.cos(0.1), math.sin(0.1)])).double().expand(1, 4, 2)
    got = made.double().embed(x, Positions.arange(4, dtype=torch.float64))[0]
    assert got[0].tolist() == pytest.approx([1.9900083306, 0.1996668333], abs=1e-6)
    assert got[3].tolist() == pytest.approx([-0.0583990446, 1.9991472061], abs=1e-6)
    fresh = build("complex", 2, 8, symbols="abc")
    expected = [10000 ** (-2 * c / 8) for c in range(4)]
    assert fresh.frequencies.shape == (3, 4)
    assert all(row.tolist() == pytest.approx(expected) for row in fresh.frequencies)


def test_complex_gradients_reach_the_words_that_are_there():
    made = build("complex", 2, 8, symbols="abcd")
    pos = Positions(torch.arange(3.0)[None], torch.arange(3.0)[None], tokens=torch.tensor([[1, 1, 3]]))
    made.embed(torch.randn(1, 3, 8), pos).square().mul(torch.arange(8)).sum().backward()
    assert made.frequencies.grad.abs().sum(1).ne(0).tolist() == [False, True, False, True]


def test_complex_refuses_and_is_filled_from_a_checkpoint():
    pos = Positions.arange(3)
    with pytest.raises(UserError, match="must be even, not 5"):
        build("complex", 1, 5)
    with pytest.raises(UserError, match="'complex' reads the tokens.*complex:frequencies=dimension"):
        build("complex", 2, 8, symbols="abc").embed(torch.zeros(1, 3, 8), pos)
    empty, made = build("complex", 2, 8), build("complex", 2, 8, symbols="abc")
    known = Positions(pos.q, pos.k, tokens=torch.tensor([[0, 2, 1]]))
    with pytest.raises(UserError, match="does not know the dictionary"):
        empty.embed(torch.zeros(1, 3, 8), known)
    with torch.no_grad():
        made.frequencies.normal_()
    empty.load_state_dict(made.state_dict())
    x = torch.randn(1, 3, 8)
    assert torch.equal(empty.embed(x, known), made.embed(x, known)) and isinstance(empty, Complex)
    with pytest.raises(RuntimeError, match="size mismatch"):
        build("complex", 2, 8, symbols="ab").load_state_dict(made.state_dict())
