"""Rotations that keep some pairs, learned frequencies, YaRN's further options: golden values, gradients, decoding."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_model
from numeric import exact, scores, vectors
from refusal import refused
from specs import REGION_ROPES

from fairseq_rpe import attend
from fairseq_rpe.attention import choose_backend
from fairseq_rpe.attention.forward import build_plan
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.encodings.model_rotation import complete_spec_for_checkpoint
from fairseq_rpe.encodings.rope_extrapolation import check_trained_rotation

YARN = "rope:scaling=yarn,factor=8,original_length=64"


def theta(spec: str, head: int, length: int | None = None, at: float = 1) -> torch.Tensor:
    """The frequencies (P,) of one head of ``head`` elements in a row of ``at`` tokens."""
    with torch.no_grad():
        return build(spec, 1, head, length).inv_freq(torch.tensor([at], dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "head", "length", "expected"),
    [
        ("keep=0.5,base=1000000", 8, None, [1, 0.0316227766, 0, 0]),
        ("keep=0.25,base=1000000", 8, None, [1, 0, 0, 0]),
        ("keep=0.75", 8, None, [1, 0.1, 0.01, 0]),
        ("keep=0.99", 8, None, [1, 0.1, 0.01, 0]),  # rounded down to whole pairs
        ("keep=1", 8, None, [1, 0.1, 0.01, 0.001]),
        ("keep=0.5,factor=4", 8, None, [0.25, 0.025, 0, 0]),
        ("keep=auto", 16, 64, [1, 10**-0.5, 0.1, 0, 0, 0, 0, 0]),
        ("keep=auto", 16, 512, [1, 10**-0.5, 0.1, 10**-1.5, 0, 0, 0, 0]),
        ("keep=auto,original_length=64", 16, 512, [1, 10**-0.5, 0.1, 0, 0, 0, 0, 0]),
        ("keep=auto", 4, 7, [1, 0]),
    ],
)
def test_proportional_frequencies(options, head, length, expected):
    assert theta(f"rope:scaling=proportional,{options}", head, length).tolist() == pytest.approx(expected, rel=1e-9)


def test_proportional_scores():
    """Of queries sin(1 + 4i + c) and keys cos(1 + 4j + c): the unrotated elements are 1 and 3, not the last half."""
    at = 1 + torch.arange(20, dtype=torch.float64).view(1, 1, 5, 4)
    rows = {
        "rope": [-0.2358367570, -0.4133516920, 0.5791947682, -0.5018701338, 0.1446963930],
        "rope:scaling=proportional,keep=0.5": [
            *(-0.2533617319, -0.4020358201, 0.5780118761, -0.5048662908, 0.1446963930)
        ],
    }
    for spec, expected in rows.items():
        row = scores(build(spec, 1, 4), at.sin(), at.cos(), exact(5))[0, 0, 4] / 2
        assert row.tolist() == pytest.approx(expected, abs=1e-9)


def test_keep_zeroes_the_slowest_pairs_after_any_scaling():
    for scaling in ("linear", "ntk", "ntk_by_parts", "llama3", "yarn"):
        spec = f"rope:scaling={scaling},factor=4"
        for length, pairs in ((64, 3), (512, 4)):
            whole, cut = (theta(f"{spec}{more}", 16, length) for more in ("", ",keep=auto"))
            assert torch.equal(cut[:pairs], whole[:pairs]) and not cut[pairs:].any()
    grown = [theta("rope:scaling=dynamic_ntk,keep=0.5", 16, 64, at) for at in (64, 256)]
    assert not grown[1][4:].any() and (grown[1][1:4] < grown[0][1:4]).all()


def test_llama3_frequencies():
    golden = [1, 0.0254647909, 0.0025, 0.00025]
    assert theta("rope:scaling=llama3,factor=4,original_length=64", 8).tolist() == pytest.approx(golden, rel=1e-8)


@pytest.mark.parametrize("truncate", [True, False])
def test_the_ends_of_yarns_ramp(truncate):
    """Against the formula, with the ends rounded outwards or as they are."""
    head, length, kappa = 64, 512, 4
    ends = [head * math.log(length / (2 * math.pi * beta)) / (2 * math.log(10000)) for beta in (32, 1)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    s = torch.arange(head // 2, dtype=torch.float64)
    plain, slower = 10000 ** (-2 * s / head), ((s - low) / (high - low)).clamp(0, 1)
    option = "" if truncate else ",truncate=false"
    got = theta(f"rope:scaling=yarn,factor={kappa}{option}", head, length)
    torch.testing.assert_close(got, plain * (1 - slower) + plain / kappa * slower, rtol=1e-12, atol=0)
    assert low != ends[0] or not truncate


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ("", 0.1 * math.log(8) + 1),
        (",mscale=1,mscale_all_dim=1", 1.0),
        (",mscale=0.707,mscale_all_dim=0.3", (0.0707 * math.log(8) + 1) / (0.03 * math.log(8) + 1)),
        (",temperature=1.25", 1.25),
    ],
)
def test_yarns_temperature(options, factor):
    q, k, _ = vectors(1, 2, 9, 8)
    ratio = scores(build(YARN + options, 2, 16), q, k, exact(9)) / scores(
        build(YARN + ",temperature=1", 2, 16), q, k, exact(9)
    )
    torch.testing.assert_close(ratio, torch.full_like(ratio, factor**2), rtol=1e-12, atol=0)
    thirty_two = build("rope:scaling=yarn,factor=32,original_length=64", 1, 8)
    assert thirty_two.amplitude(exact(1).q, exact(1), key=False).item() == pytest.approx(1.3465735903)


# learned frequencies

LEARNED = [
    "rope:frequencies=learned",
    YARN + ",frequencies=learned",
    "rope:scaling=proportional,keep=0.5,frequencies=learned",
]
LEARNED += ["rope:frequencies=learned,logn=plain,original_length=8", "rope:frequencies=learned,interleaved=true"]


def fixed(spec: str) -> str:
    return (
        spec.replace(",frequencies=learned", "").replace("frequencies=learned,", "").replace(":frequencies=learned", "")
    )


def moved(spec: str, heads: int, width: int):
    """An encoding whose frequencies are not those of the start."""
    encoding = build(spec, heads, width).double()
    with torch.no_grad():
        encoding.log_frequency_factor.copy_(torch.linspace(-0.4, 0.3, width // heads // 2))
    return encoding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", LEARNED)
def test_learned_frequencies_start_as_rope_bit_for_bit(spec, dtype):
    x, pos = vectors(2, 2, 70, 16, dtype=dtype)[0], Positions.arange(70)
    learned, plain = build(spec, 2, 32), build(fixed(spec), 2, 32)
    rotate = build_plan(learned, pos, None, choose_backend("reference")).rotate
    for key in (False, True):
        at = pos.k if key else pos.q
        expected = plain.rotate(x, at, pos, key=key)
        assert torch.equal(learned.rotate(x, at, pos, key=key), expected)
        assert torch.equal(rotate(x, at, pos, key=key), expected)
    # a new key of a cache, rotated at the position of its query
    step = Positions(pos.q[:, -1:], pos.k)
    rotate = build_plan(learned, step, None, choose_backend("reference")).rotate
    for key in (False, True):
        last = plain.rotate(x[:, :, -1:], step.q, step, key=key)
        assert torch.equal(rotate(x[:, :, -1:], step.q, step, key=key), last)


@pytest.mark.parametrize("spec", LEARNED)
def test_learned_frequencies_are_theta_times_a_factor(spec):
    encoding = moved(spec, 2, 32)
    length = torch.tensor([50.0], dtype=torch.float64)
    expected = build(fixed(spec), 2, 32).inv_freq(length) * encoding.log_frequency_factor.exp()
    torch.testing.assert_close(encoding.inv_freq(length), expected, rtol=1e-12, atol=0)
    x, pos = vectors(1, 2, 9, 16)[0], exact(9)
    with torch.no_grad():
        before = encoding.rotate(x, pos.q, pos)
        encoding.log_frequency_factor.add_(0.1)
        assert not torch.equal(encoding.rotate(x, pos.q, pos), before)  # nothing stale for the same positions


@pytest.mark.parametrize("spec", LEARNED)
def test_gradients_of_learned_frequencies(spec):
    """Against differences, through the whole of attention; a pair that does not rotate has none."""
    encoding, (q, k, v) = moved(spec, 2, 32), vectors(1, 2, 11, 16)

    def loss() -> torch.Tensor:
        return attend(q, k, v, encoding, positions=exact(11), backend="reference").sin().sum()

    parameter = encoding.log_frequency_factor
    (grad,) = torch.autograd.grad(loss(), [parameter])
    step = 1e-5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        ahead = parameter.add_(step) is parameter and loss().item()
        behind = parameter.sub_(2 * step) is parameter and loss().item()
    assert ahead - behind == pytest.approx(2 * (grad * step).sum().item(), rel=1e-5)
    rotating = encoding.inv_freq(torch.ones(1).double()) != 0
    assert grad[rotating].all() and not grad[~rotating].any()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("share", "number"), [("auto", 1), ("layer", 2)])
def test_training_reaches_learned_frequencies(task, checkpointed, share, number):
    spec = "rope:frequencies=learned"
    model = make_model(task, spec, rpe_share=share, checkpoint_activations=checkpointed).train()
    plain = make_model(task, "rope").train()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "log_frequency_factor" not in k})
    ids = torch.randint(4, 60, (2, 21), generator=torch.Generator().manual_seed(0))
    out = model(ids)[0]
    assert torch.equal(out, plain(ids)[0])
    out.square().mean().backward()
    parameters = [p for name, p in model.named_parameters() if "log_frequency_factor" in name]
    assert len(parameters) == number and all(p.grad.all() for p in parameters)


def test_learned_frequencies_of_a_model():
    shared, own = (build_for_model("rope:frequencies=learned", 2, 32, 3, share=share) for share in ("auto", "layer"))
    assert len(shared) == 1 and len(own) == 3
    with refused("'rope' can only be shared by: model"):
        build_for_model("rope", 2, 32, 3, share="layer")
    half = own[0].half()
    assert half.log_frequency_factor.dtype == torch.float32
    waves = moved("rope:scaling=proportional,keep=0.5,frequencies=learned", 2, 32).logged_scalars()
    assert list(waves) == [f"wavelength_pair{s}" for s in range(4)]
    assert waves["wavelength_pair1"].item() == pytest.approx(2 * math.pi * 10**0.5 / math.exp(-0.3))
    assert not build("rope", 2, 32).logged_scalars()
    with torch.device("meta"):
        assert list(build("rope:frequencies=learned", 2, 32).logged_scalars())[-1] == "wavelength_pair7"


# beside a trained rotation


@pytest.mark.parametrize(
    ("spec", "trained", "taken"),
    [
        ("rope:scaling=yarn,factor=4", "rope:scaling=proportional,keep=0.25", ",keep=0.25"),
        ("rope:scaling=linear,factor=2", "rope:scaling=proportional,keep=auto", ",keep=auto"),
        ("rope:scaling=linear,factor=2", "rope:frequencies=learned", ",frequencies=learned"),
        # methods of fine-tuning
        ("rope:scaling=proportional,keep=0.5", "rope", ""),
        ("rope:frequencies=learned", "rope", ""),
        ("nope", "rope:frequencies=learned", ""),
    ],
)
def test_the_trained_pairs_and_frequencies_stay(spec, trained, taken):
    assert complete_spec_for_checkpoint(spec, trained) == spec + taken


@pytest.mark.parametrize(
    ("spec", "trained", "words"),
    [
        ("rope:scaling=none", "rope:scaling=proportional,keep=0.25", "has no option keep.*such as rope:scaling=prop"),
        ("rope", "rope:scaling=proportional,keep=0.25", r"is scaled \(proportional\)"),
        ("longrope:factors=2", "rope:frequencies=learned", "has no option frequencies"),
    ],
)
def test_what_would_drop_them_is_refused(spec, trained, words):
    with refused(words):
        complete_spec_for_checkpoint(spec, trained)


@pytest.mark.parametrize("trained", ["rope:frequencies=learned", "rope:scaling=proportional,keep=0.5"])
@pytest.mark.parametrize("name", REGION_ROPES)
def test_remapped_distances_need_plain_rope(name, trained):
    with refused("needs plain rope"):
        check_trained_rotation(name, trained)
