"""Against implementations by others, where they are installed (pip install transformers x-transformers fla-core)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fairseq_rpe import attend
from fairseq_rpe.attention.relative_shift import materialize_fast
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.encodings.t5 import relative_position_bucket


def library(name: str) -> ModuleType:
    """The module, or skip where the package is not installed; one that is and does not load is a failure."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "transformers":
        importlib.import_module("fairseq_rpe.adapters._require_transformers")  # for its way with torchaudio
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        pytest.fail(f"{package} is installed and {name} does not load ({error}): repair it or remove it")


@pytest.mark.parametrize("heads", [8, 12, 16, 6])
def test_alibi_of_bloom(heads):
    bloom = library("transformers.models.bloom.modeling_bloom")
    n = 33
    theirs = bloom.build_alibi_tensor(torch.ones(1, n, dtype=torch.long), heads, torch.float32)[:, 0]
    ours = build("alibi", heads, heads * 8).bias_profile(n).flip(-1).float()
    # Bloom adds k·j to every row, which softmax cannot tell from -k·(i - j)
    torch.testing.assert_close(theirs - theirs[:, -1:], ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (64, 128), (32, 500)])
def test_buckets_of_t5(buckets, far):
    t5 = library("transformers.models.t5.modeling_t5")
    d = torch.arange(1500)
    theirs = t5.T5Attention._relative_position_bucket(-d, bidirectional=False, num_buckets=buckets, max_distance=far)
    assert torch.equal(relative_position_bucket(d.float(), buckets, far), theirs)


@pytest.mark.parametrize("heads", [8, 12])
def test_alibi_of_x_transformers(heads):
    theirs_all = library("x_transformers.x_transformers")
    n = 21
    theirs = theirs_all.AlibiPositionalBias(heads=heads, total_heads=heads)(n, n)[:, -1].flip(-1)
    torch.testing.assert_close(theirs, build("alibi", heads, heads * 8).bias_profile(n).float())
    assert theirs_all.AlibiPositionalBias._get_slopes(heads) == pytest.approx(alibi_slopes(heads))


def test_neighbours_turn_as_in_gptj():
    """GPT-NeoX and Llama, which pair halves: see tests/adapters."""
    gptj, q, pos = library("transformers.models.gptj.modeling_gptj"), torch.randn(2, 8, 50, 64), Positions.arange(50)
    sin, cos = gptj.create_sinusoidal_positions(50, 64).chunk(2, dim=-1)
    theirs = gptj.apply_rotary_pos_emb(q.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    for key in (False, True):
        ours = build("rope:interleaved=true", 8, 512).rotate(q, pos.q, pos, key=key)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def projected(x, project, heads):
    return project(x).unflatten(2, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(("buckets", "far"), [(-1, 7), (6, 12)])
def test_attention_of_deberta_v2(buckets, far):
    deberta = library("transformers.models.deberta_v2.modeling_deberta_v2")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "position_buckets": buckets, "max_relative_positions": far}
    config = deberta.DebertaV2Config(**sizes, pos_att_type=["c2p", "p2c"], relative_attention=True)
    theirs = deberta.DisentangledSelfAttention(config).double().eval()
    spec = f"deberta:max_distance={far}" + (f",buckets={buckets}" if buckets > 0 else "")
    ours = build(spec, 4, 32).double()
    n, x = 23, torch.randn(2, 23, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.nn.init.zeros_(theirs.pos_key_proj.bias)  # as in version 1, which has none
        ours.to_key.weight.copy_(theirs.pos_key_proj.weight)
        ours.to_query.load_state_dict(theirs.pos_query_proj.state_dict())
        seen = torch.ones(n, n, dtype=torch.bool).tril().expand(2, 1, -1, -1)
        wanted = theirs(x, seen, rel_embeddings=ours.table)[0]
        q, k, v = (projected(x, project, 4) for project in (theirs.query_proj, theirs.key_proj, theirs.value_proj))
        positions = Positions.arange(n, dtype=torch.float64)
        got = attend(q, k, v, ours, positions=positions).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # its scale is float32


def test_shift_of_transformer_xl_and_xlnet():
    xlnet = library("transformers.models.xlnet.modeling_xlnet")
    torch.manual_seed(0)
    n, encoding = 19, build("transformer_xl", 3, 24).double()
    q, k = (torch.randn(2, 3, n, 8, dtype=torch.float64) for _ in range(2))
    pos = Positions.arange(n, dtype=torch.float64)
    by_distance = encoding.content_bias(q, k, pos, None).terms[0]
    products = by_distance.query @ by_distance.vectors.flip(1).mT  # columns of falling distances, as there
    theirs = xlnet.XLNetRelativeAttention.rel_shift_bnij(torch.nn.functional.pad(products, (1, 0)), klen=n)
    torch.testing.assert_close(by_distance.materialize(pos).tril(), theirs.tril(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(materialize_fast(by_distance, pos).tril(), theirs.tril(), rtol=1e-12, atol=1e-12)


def test_cope_of_x_transformers():
    theirs = library("x_transformers.x_transformers").CoPE(dim=8, heads=3, max_pos=5)
    torch.manual_seed(0)
    ours = build("cope:max_positions=5,scale_on=content", 3, 24)
    q, k = torch.randn(2, 2, 3, 17, 8)
    future = torch.ones(17, 17, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / 8**0.5).masked_fill(future, float("-inf"))
    with torch.no_grad():
        ours.vectors.normal_()
        theirs.pos_emb.copy_(ours.vectors.T)
        got, wanted = ours.transform_scores(scores, q, Positions.arange(17)), scores + theirs(q, scores)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_forgetting_of_x_transformers():
    theirs = library("x_transformers.x_transformers").DataDependentAlibi(dim=24, heads=3)
    ours = build("forgetting:init=5", 3, 24)
    assert torch.equal(ours.bias, theirs.to_forget_gates[0].bias)
    x, q = torch.randn(2, 17, 24), torch.randn(2, 3, 17, 8)
    with torch.no_grad():
        linear = theirs.to_forget_gates[0]
        ours.project.weight.copy_(linear.weight)
        ours.bias.copy_(linear.bias)
        pos = Positions.arange(17)
        got = ours.content_bias(q, q, pos, ours.token_features(x)).materialize(pos).float().tril()
        torch.testing.assert_close(got, theirs(x).tril(), rtol=1e-5, atol=1e-5)


def test_forgetting_of_pairs_in_x_transformers():
    theirs = library("x_transformers.x_transformers").PerRowDataDependentAlibi(dim=24, heads=3)
    ours, x, q, pos = build("pairwise_forgetting", 3, 24), *torch.randn(2, 2, 17, 24), Positions.arange(17)
    with torch.no_grad():
        ours.project.weight.copy_(theirs.to_forget_gates[0].weight)
        q = q.unflatten(2, (3, -1)).transpose(1, 2)
        got = ours.content_bias(q, q, pos, ours.token_features(x)).materialize(pos).tril()
        torch.testing.assert_close(got, theirs(x).tril(), rtol=1e-5, atol=1e-5)


def test_selective_attention_of_x_transformers():
    theirs = library("x_transformers.attend").selective_attn
    torch.manual_seed(0)
    q, k, ours, pos = *torch.randn(2, 2, 3, 17, 8), build("selective", 3, 24), Positions.arange(17)
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(17, 17, dtype=torch.bool).triu(1), float("-inf"))
    got, _ = ours.transform_scores_with_state(scores, q, pos, torch.zeros(2, 1, 17, 1))
    torch.testing.assert_close(got, theirs(scores), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gate", ["none", "forget"])
def test_path_attention_of_fla(gate):
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("fla-core is not installed")
    # the package itself needs Triton, and this file does not
    file = Path(next(iter(package.submodule_search_locations))) / "ops/path_attn/naive.py"
    spec = importlib.util.spec_from_file_location("naive_path_attn", file)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    ours = build(f"path:conv=0,rank=0,gate={gate}" + (",scaled_gate=true" if gate == "forget" else ""), 3, 24)
    q, k, v, x = *torch.randn(3, 2, 3, 70, 8), torch.randn(2, 70, 24)
    with torch.no_grad():
        features = ours.token_features(x)  # (2, 3, 70, 9 or 10)
        w = torch.nn.functional.normalize(features[..., :8], dim=-1)
        beta = 2 * features[..., 8].sigmoid()
        log_gate = torch.nn.functional.logsigmoid(features[..., 9]) if gate == "forget" else torch.zeros(2, 3, 70)
        tensors = [t.transpose(1, 2) for t in (q, k, v, w, beta, log_gate)]
        expected = theirs.naive_path_attn(*tensors, scale=8**-0.5, chunk_size=16).transpose(1, 2)
        torch.testing.assert_close(attend(q, k, v, ours, features=features), expected, rtol=1e-4, atol=1e-5)
