"""Against implementations by others, where they are installed (pip install transformers x-transformers)."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.encodings.t5 import bucket


def library(name: str) -> ModuleType:
    """The module, or skip where the package is not installed; one that is and does not load is a failure."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "transformers":
        importlib.import_module("fairseq_rpe.adapters.present")  # for its way with torchaudio
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.fail(f"{package} is installed and {name} does not load ({error}): repair it or remove it")


@pytest.mark.parametrize("heads", [8, 12, 16, 6])
def test_alibi_of_bloom(heads):
    bloom = library("transformers.models.bloom.modeling_bloom")
    n = 33
    theirs = bloom.build_alibi_tensor(torch.ones(1, n, dtype=torch.long), heads, torch.float32)[:, 0]
    ours = build("alibi", heads, heads * 8).profile(n).flip(-1).float()
    # Bloom adds k·j to every row, which softmax cannot tell from -k·(i - j)
    torch.testing.assert_close(theirs - theirs[:, -1:], ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (64, 128), (32, 500)])
def test_buckets_of_t5(buckets, far):
    t5 = library("transformers.models.t5.modeling_t5")
    d = torch.arange(1500)
    theirs = t5.T5Attention._relative_position_bucket(-d, bidirectional=False, num_buckets=buckets, max_distance=far)
    assert torch.equal(bucket(d.float(), buckets, far), theirs)


@pytest.mark.parametrize("heads", [8, 12])
def test_alibi_of_x_transformers(heads):
    theirs_all = library("x_transformers.x_transformers")
    n = 21
    theirs = theirs_all.AlibiPositionalBias(heads=heads, total_heads=heads)(n, n)[:, -1].flip(-1)
    torch.testing.assert_close(theirs, build("alibi", heads, heads * 8).profile(n).float())
    assert theirs_all.AlibiPositionalBias._get_slopes(heads) == pytest.approx(alibi_slopes(heads))
