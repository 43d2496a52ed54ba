"""Against implementations by others, where they are installed (pip install transformers x-transformers)."""

from __future__ import annotations

import importlib

import pytest
import torch
from numeric import exact

from fairseq_rpe import attend
from fairseq_rpe.encodings import build

pytest.importorskip("transformers")
importlib.import_module("fairseq_rpe.adapters.present")  # for its way with torchaudio


@pytest.mark.parametrize("heads", [8, 12, 16, 6])
def test_alibi_of_bloom(heads):
    bloom = importlib.import_module("transformers.models.bloom.modeling_bloom")
    n = 33
    theirs = bloom.build_alibi_tensor(torch.ones(1, n, dtype=torch.long), heads, torch.float32)[:, 0]
    ours = build("alibi", heads, heads * 8).profile(n).flip(-1).float()
    # Bloom adds k·j to every row, which softmax cannot tell from -k·(i - j)
    torch.testing.assert_close(theirs - theirs[:, -1:], ours, rtol=1e-5, atol=1e-5)


def projected(x, project, heads):
    return project(x).unflatten(2, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(("buckets", "far"), [(-1, 7), (6, 12)])
def test_attention_of_deberta_v2(buckets, far):
    deberta = importlib.import_module("transformers.models.deberta_v2.modeling_deberta_v2")
    torch.manual_seed(0)
    config = deberta.DebertaV2Config(hidden_size=32, num_attention_heads=4, position_buckets=buckets)
    config.update({"pos_att_type": ["c2p", "p2c"], "relative_attention": True, "max_relative_positions": far})
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
        got = attend(q, k, v, ours, positions=exact(n)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # its scale is float32
