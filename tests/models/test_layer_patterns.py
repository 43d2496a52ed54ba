"""Models whose layers have different encodings: equality with single specs, decoding, documents and refusals."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from conftest import PACKAGE, TRAIN_FLAGS, make_model, run_here
from in_process import fairseq
from refusal import refusal, refused

from fairseq_rpe.runs import checkpoints

PATTERNS = ("2*alibi|nope", "rope|fire", "start=nope|rope:base=500|kerple_log|end=t5_bias", "3*rope|deberta")
LAYERS = 4


def tokens(rows: int, n: int) -> torch.Tensor:
    return torch.randint(4, 60, (rows, n), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("spec", ["alibi", "fire", "rope"])
def test_equal_parts_are_the_plain_spec_bit_for_bit(task, spec):
    x, results = tokens(2, 21), []
    for rpe in (spec, f"2*{spec}|{spec}", f"start={spec}|{spec}"):
        model = make_model(task, rpe, decoder_layers=LAYERS)
        out = model(x)[0]
        out.square().mean().backward()
        results.append((out, model.state_dict(), {name: p.grad for name, p in model.named_parameters()}))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_each_layer_has_its_encoding(task):
    """A model whose first layer has no bias, and whose second has that of a plain model, mixes both models' layers."""
    mixed, x = make_model(task, "nope|alibi"), tokens(1, 12)
    nope, alibi = make_model(task, "nope"), make_model(task, "alibi")
    for other in (nope, alibi):
        other.load_state_dict(mixed.state_dict())
    outputs = {}

    def record(name):
        return lambda layer, args, out: outputs.setdefault(name, out[0] if isinstance(out, tuple) else out)

    for name, model in (("mixed", mixed), ("nope", nope)):
        model.decoder.layers[0].register_forward_hook(record(name))
    logits = [model(x)[0] for model in (mixed, nope, alibi)]
    torch.testing.assert_close(outputs["mixed"], outputs["nope"], rtol=0, atol=0)
    assert all((logits[0] - other).abs().max() > 1e-4 for other in logits[1:])


@pytest.mark.parametrize("spec", PATTERNS)
def test_decoding_token_by_token_equals_one_pass(task, spec):
    model, x = make_model(task, spec, decoder_layers=LAYERS), tokens(2, 15)
    state = {}
    with torch.no_grad():
        whole = model(x)[0]
        steps = [model(x[:, : n + 1], incremental_state=state)[0][:, -1] for n in range(15)]
    torch.testing.assert_close(torch.stack(steps, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", PATTERNS)
def test_gradients_reach_every_parameter(task, spec):
    model = make_model(task, spec, decoder_layers=LAYERS).train()
    model(tokens(2, 15))[0].square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_names_of_parameters(task):
    names = make_model(task, "kerple_log|nope|fire", decoder_layers=LAYERS).state_dict()
    numbers = {name.split(".")[2] for name in names if name.startswith("decoder.encodings.")}
    assert numbers == {"0", "2"}  # kerple_log in layers 0 and 3, nope, fire


def test_documents_in_one_row_are_read_as_if_alone(task):
    model, x = make_model(task, "2*alibi|nope", decoder_layers=LAYERS), tokens(1, 16)
    documents = torch.tensor([[0] * 9 + [1] * 7])
    with torch.no_grad():
        together = model(x, documents=documents)[0]
        alone = torch.cat([model(x[:, :9])[0], model(x[:, 9:])[0]], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_position_transforms(task):
    model = make_model(task, "2*rope|nope", decoder_layers=LAYERS, positions_eval="offset:tokens=7")
    plain, x = make_model(task, "2*rope|nope", decoder_layers=LAYERS), tokens(1, 10)
    torch.testing.assert_close(model(x)[0], plain(x)[0], rtol=1e-4, atol=1e-5)
    with refused("'t5_bias' accepts whole positions only"):
        make_model(task, "rope|t5_bias", positions_eval="interpolate:ratio=0.5")
    with refused("'nope' and 'cope' read no positions"):
        make_model(task, "nope|cope", positions_eval="interpolate:ratio=0.5")


def test_pruning_needs_a_bias_of_the_distance_in_every_layer(task):
    make_model(task, "alibi|kerple_log", attention_backend="sdpa").decoder.prune_attention(0.1)
    with refused("cannot be pruned"):
        make_model(task, "alibi|nope", attention_backend="sdpa").decoder.prune_attention(0.1)
    for option in ("block=4", "softcap=2", "null_logit=zero"):  # before anything is computed
        with refused(f"'alibi:{option}': the bound of pruning does not cover {option.split('=')[0]}"):
            make_model(task, f"alibi|alibi:{option}", attention_backend="sdpa").decoder.prune_attention(0.1)


def test_cut_off_pattern_is_logged(task, caplog):
    with caplog.at_level(logging.INFO):
        make_model(task, "2*alibi|nope", decoder_layers=LAYERS)
    assert "cut off at the last layer: 4 layers are no multiple of 3" in caplog.text
    caplog.clear()
    make_model(task, "2*alibi|nope", decoder_layers=3)
    assert "cut off" not in caplog.text


REFUSED = {
    "3*rope|nope": "more layers than the 2 of the model",
    "rope|sinusoidal": "'sinusoidal' acts at the input of the model",
    "rope|nopo": "unknown encoding 'nopo'",
    "rope|": "a part is empty",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refused_patterns(task, spec):
    with refused(REFUSED[spec]):
        make_model(task, spec)


def test_refused_options(task):
    with refused("--decoder-layers-to-keep would give the remaining layers other encodings"):
        make_model(task, "alibi|nope", decoder_layers=4, decoder_layers_to_keep="0,2")
    with refused("--rpe-share layer: 'rope\\|nope' can only be shared by: model"):
        make_model(task, "rope|nope", rpe_share="layer")
    with refused("needs all scores of a query, which backend 'flex' never holds"):
        make_model(task, "alibi|shaw:values=true", attention_backend="flex")


@pytest.fixture(scope="module", params=["2*alibi|nope", "2*kerple_log|nope"])
def checkpoint(request, corpus, tmp_path_factory) -> Path:
    """A checkpoint of four layers after two updates."""
    folder = tmp_path_factory.mktemp("pattern")
    flags = ["--rpe", request.param, "--decoder-layers", 4, "--max-update", 2, "--disable-validation"]
    fairseq("train", corpus, *TRAIN_FLAGS, *map(str, flags), "--save-dir", folder)
    return folder / "checkpoint_last.pt"


def losses(corpus: Path, checkpoint: Path, *flags: str) -> list[str]:
    """Perplexities at 32 and 64 tokens as ``eval`` prints them."""
    done = run_here("eval", checkpoint, corpus, "--lengths", "32,64", *flags)
    return re.findall(r"^ +(?:32|64) +([\d.]+)", done.stdout, re.MULTILINE)


def test_trained_saved_loaded_evaluated_and_decoded(corpus, checkpoint):
    loaded = checkpoints.load(checkpoint)
    encodings = loaded.load_encodings()
    assert encodings.index == (0, 0, 1, 0) and loaded.encoding.endswith("|nope")
    plain = losses(corpus, checkpoint)
    assert len(plain) == 2
    biased = loaded.encoding.removeprefix("2*").removesuffix("|nope")
    assert losses(corpus, checkpoint, "--rpe", f"{biased}|{biased}|rope") != plain  # rope has no parameters either
    assert losses(corpus, checkpoint, "--rpe", f"2*{biased}|nope:local=64") == plain
    flags = ["--user-dir", PACKAGE, "--task", "language_modeling", "--path", checkpoint, "--cpu", "--beam", "2"]
    assert "H-0" in fairseq("interactive", corpus, *flags, "--max-len-b", "9", input="the house\n").stdout
    message = refusal("eval", checkpoint, corpus, "--lengths", 32, "--rpe", "rope")
    assert "no layer of the model" in message


def test_weights_of_other_layers_are_refused(corpus, checkpoint):
    if "kerple_log" in checkpoints.load(checkpoint).encoding:
        line = refusal("eval", checkpoint, corpus, "--lengths", 32, "--rpe", "nope|2*kerple_log")
        assert "layers" in line and "share" in line


def test_more_encodings_than_the_pattern_has_are_refused(checkpoint, tmp_path):
    state = torch.load(checkpoint)
    state["model"]["decoder.encodings.3.raw_p"] = torch.zeros(4)
    torch.save(state, tmp_path / "more.pt")
    with refused("has other parameters than .*: train it again"):
        checkpoints.load(tmp_path / "more.pt").load_encodings()
    state["model"]["decoder.encodings.4.raw_p"] = torch.zeros(4)
    torch.save(state, tmp_path / "more.pt")
    with refused("one of them '4'"):
        checkpoints.load(tmp_path / "more.pt")
