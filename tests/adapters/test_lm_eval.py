"""lm-evaluation-harness with local tasks: the same log-probabilities and texts as the package's own.

``pip install -e ".[lm-eval]"`` in an environment of its own; the package is not among the requirements of the tests.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from prepared_folder import LINES, vocabulary
from refusal import refused

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from test_export import decoder, pretrained

from fairseq_rpe.adapters import lm_eval
from fairseq_rpe.adapters.export_tokenizer import export_tokenizer
from fairseq_rpe.data.tokenization import load_encoder

pytestmark = pytest.mark.release
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{question}"
doc_to_target: "{target}"
{more}
metadata: {{version: 1.0}}
"""
TEXTS = ["\n".join(LINES[:2]), "The wheel.\n  Tamsin rose in March, said Bren. "]
QUESTIONS = [{"question": "Who mended", "choices": ["the wheel", "March\n", "x"], "label": 1}]


@pytest.fixture
def folder(tmp_path) -> Path:
    data = vocabulary(tmp_path / "data")
    out = tmp_path / "model"
    pretrained(decoder("kerple_log", "llama", vocabulary=300), "kerple_log", eos_token_id=None).save_pretrained(out)
    export_tokenizer("bpe", data, out)
    return out


def evaluate(folder: Path, tasks: Path, **more) -> dict:
    for name, kind, rows, question, target, extra in [
        ("rolling", "loglikelihood_rolling", [{"text": t} for t in TEXTS], "", "{{text}}", "bits_per_byte"),
        ("choice", "multiple_choice", QUESTIONS, "{{question}}", "{{label}}", "acc"),
    ]:
        file = tasks / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = f"metric_list: [{{metric: {extra}}}]"
        options += '\ndoc_to_choice: "{{choices}}"' if name == "choice" else ""
        text = TASK.format(name=name, file=file, kind=kind, question=question, target=target, more=options)
        (tasks / f"{name}.yaml").write_text(text)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    arguments = {"model": "fairseq_rpe", "model_args": {"checkpoint": str(folder)}, "device": "cpu", **more}
    return simple_evaluate(
        **arguments, tasks=["rolling", "choice"], task_manager=manager, bootstrap_iters=0, log_samples=True
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_probabilities(folder, tmp_path, batch_size, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    model, encoder = decoder("kerple_log", "llama", vocabulary=300), load_encoder("bpe", tmp_path / "data")

    def logprob(context: str, text: str) -> float:
        given = len(encoder.encode(context))
        ids = torch.tensor([[2, *encoder.encode(context + text).tolist()]])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids[:, :-1])[0].double(), -1)
        return float(scores.gather(1, ids[0, 1:, None])[given:].sum())

    results = evaluate(folder, tmp_path, batch_size=batch_size)
    bits = -sum(logprob("", text) for text in TEXTS) / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert results["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    [sample] = results["samples"]["choice"]
    expected = [logprob(QUESTIONS[0]["question"], f" {choice}") for choice in QUESTIONS[0]["choices"]]
    assert [response[0][0] for response in sample["resps"]] == pytest.approx(expected, abs=1e-6)  # nats


@pytest.mark.parametrize("spec", ["alibi", "rope:scaling=dynamic_ntk"])
def test_generate_until(spec, folder, tmp_path):
    """The texts are greedy, also where the values of an encoding follow the length; prompts are padded together."""
    model, encoder, out = (
        decoder(spec, "llama", vocabulary=300),
        load_encoder("bpe", tmp_path / "data"),
        tmp_path / spec,
    )
    pretrained(model, spec, eos_token_id=None).save_pretrained(out)
    export_tokenizer("bpe", tmp_path / "data", out)
    loaded = lm_eval.FairseqRpeLM(str(out), device="cpu", batch_size=2 if spec == "alibi" else 1)
    options = {"until": ["zzz"], "max_gen_toks": 24, "do_sample": False}  # the training length is 16
    requests = [Instance("generate_until", {}, (text, options), n) for n, text in enumerate(TEXTS)]
    for text, generated in zip(TEXTS, loaded.generate_until(requests, disable_tqdm=True), strict=True):
        ids = torch.tensor([[2, *encoder.encode(text).tolist()]])
        start = ids.shape[1]
        for _ in range(24):
            with torch.no_grad():
                logits = model(ids)[:, -1]  # (1, V)
            logits[:, 1] = -math.inf  # padding
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        assert generated == loaded.tok_decode(ids[0, start:])


def test_refusals(folder, tmp_path):
    for arguments, message in [
        ({"rpe_eval": "alibi"}, "rpe_eval has no effect on an exported model"),
        ({"batch_size": "auto"}, "give max_length=N"),
    ]:
        with refused(message):
            lm_eval.FairseqRpeLM(str(folder), device="cpu", **arguments)
    spec = "rope:scaling=dynamic_ntk"
    out = tmp_path / "dynamic"
    pretrained(decoder(spec, "llama", vocabulary=300), spec).save_pretrained(out)
    with refused("has no tokenizer"):
        lm_eval.FairseqRpeLM(str(out), device="cpu")
    export_tokenizer("bpe", tmp_path / "data", out)
    with refused("depends on the length of a row, .*batch_size=1"):
        lm_eval.FairseqRpeLM(str(out), device="cpu", batch_size=2)
