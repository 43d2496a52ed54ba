"""Tasks with several questions in one sequence: labels, loss, and accuracy by gap."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import make_model, run_here
from measuring import rows_of
from torch.nn import functional as F

from fairseq_rpe.algorithms import build
from fairseq_rpe.criterions.answer_cross_entropy import AnswerCrossEntropy
from fairseq_rpe.evaluation import exact_match
from fairseq_rpe.evaluation.records import ExactMatchResult, read_results
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.tasks.algorithmic import AlgorithmicConfig, AlgorithmicTask

TASK = "mqar:items=16,times=2,least=12,train=300,valid=20,test=30,pairs=2,alphabet=6"
PAD = 1


@pytest.fixture(scope="module")
def task() -> AlgorithmicTask:
    task = AlgorithmicTask.setup_task(AlgorithmicConfig(algorithm=TASK))
    for split in ("train", "test"):
        task.load_dataset(split)
    return task


def batch(task: AlgorithmicTask, split: str, indices: range) -> dict:
    data = task.dataset(split)
    return data.collater([data[i] for i in indices])


def test_only_the_queries_have_labels(task):
    sample, words = batch(task, "train", range(40)), task.source_dictionary
    source, target, answer = sample["net_input"]["src_tokens"], sample["target"], sample["answer"]
    examples = task.dataset("train").examples[:40]
    assert len({e.length for e in examples}) > 1 and source.shape == (40, 16)  # so that there is padding
    for i, example in enumerate(examples):
        assert [words[token] for token in source[i, : example.length]] == list(example.prompt)
        assert (source[i, example.length :] == PAD).all()
        assert answer[i].nonzero()[:, 0].tolist() == list(example.label_indices)
        assert [words[token] for token in target[i][answer[i]]] == list(example.answer)
        assert (target[i][~answer[i]] == PAD).all()
        assert task.dataset("train").sizes[i] == example.length
    assert sample["ntokens"] == sum(e.length for e in examples) and task.train_tokens == 16


def test_the_loss_is_that_of_the_labels_alone(task):
    sample, model = batch(task, "train", range(8)), make_model(task, "alibi").train()
    loss, size, log = AnswerCrossEntropy(task)(model, sample)
    logits = model(sample["net_input"]["src_tokens"])[0].double()
    losses, right = [], []
    for i, example in enumerate(task.dataset("train").examples[:8]):
        for place, word in zip(example.label_indices, example.answer, strict=True):
            label = torch.tensor(task.source_dictionary.indices[word])
            losses.append(F.cross_entropy(logits[i, place], label))
            right.append(int(logits[i, place].argmax()) == label)
    assert size == len(losses) == 16 and log["right_tokens"] == sum(right)
    assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-6)


def test_a_training_step_lowers_the_loss_of_the_labels(task):
    sample, model, criterion = batch(task, "train", range(16)), make_model(task, "rope"), AnswerCrossEntropy(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss, size, _ = criterion(model.train(), sample)
        optimizer.zero_grad()
        (loss / size).backward()
        optimizer.step()
        losses.append(loss.item() / size)
    assert losses[0] > losses[1] > losses[2]


def command(out: Path) -> list[str]:
    small = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
    training = ["--updates", "12", "--batch-sentences", "16", "--lr", "0.01", "--warmup", "5", "--device", "cpu"]
    return ["sweep", "--algorithms", TASK, "--encodings", "alibi", "--out", str(out), *training, *small]


@pytest.fixture(scope="module")
def checkpoint(made_once) -> Path:
    folder = made_once("labels", lambda folder: run_here(*command(folder / "out"))) / "out"
    return SweepFolder(folder).run_folder(Method("alibi", "alibi"), 1, TASK).checkpoints.last


@torch.no_grad()
def count_by_gap(checkpoint: Path, n: int) -> tuple[Counter, Counter]:
    """Questions and right answers by the power of two at or below the gap, from one forward pass per example."""
    from fairseq import checkpoint_utils

    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    examples, right, words = Counter(), Counter(), task.source_dictionary
    for example in build(TASK).examples("test"):
        if example.length == n:
            logits = model.eval()(torch.tensor([[words.indices[word] for word in example.prompt]]))[0][0]  # (n, V)
            logits[:, PAD] = -torch.inf
            for place, word, gap in zip(example.label_indices, example.answer, example.gaps, strict=True):
                power = max(2**k for k in range(10) if 2**k <= gap)
                examples[power] += 1
                right[power] += words[int(logits[place].argmax())] == word
    return examples, right


def test_accuracy_by_gap(checkpoint, tmp_path):
    out = tmp_path / "eval.jsonl"
    rows = rows_of("eval-task", checkpoint, "--out", out, "--batch-size", "7")
    assert [row["length"] for row in rows] == [16, 32]
    for row in rows:
        examples, right = count_by_gap(checkpoint, row["length"])
        counts = {part["gap"]: (part["examples"], part["right"]) for part in row["by_gap"]}
        assert counts == {gap: (examples[gap], right[gap]) for gap in sorted(examples)} and len(counts) > 2
        assert (row["examples"], row["right"]) == (60, sum(right.values()))  # two questions in each of 30 sequences
        assert row["accuracy"] == row["right"] / 60
    assert 0 < sum(row["right"] for row in rows) < 120
    stored = [json.dumps(result.to_json()) for result in read_results(ExactMatchResult, out)]
    assert [json.loads(line) for line in stored] == rows
    assert "exact % by gap" in run_here("eval-task", str(checkpoint), "--out", str(out)).stdout


@pytest.mark.parametrize("transform", ["randomized:times=4", "interpolate"])
def test_positions_of_evaluation(checkpoint, transform):
    (row,) = rows_of("eval-task", checkpoint, "--lengths", "32", "--positions-eval", transform)
    assert row["transform"] == ("interpolate:ratio=0.5" if transform == "interpolate" else transform)
    assert sum(part["examples"] for part in row["by_gap"]) == row["examples"] == 60


def test_answers_of_different_lengths_are_compared_up_to_their_end():
    """Sums have n or n + 1 digits; whatever a model generates after the end does not count."""
    task = AlgorithmicTask.setup_task(AlgorithmicConfig(algorithm="addition:train=40,least=3,items=3"))
    task.load_dataset("train")
    data, rows = task.dataset("train"), list(range(40))
    answers = data.prompts(rows)[1]
    assert {len(e.answer) for e in data.examples} == {3, 4} and answers.shape == (40, 5)
    assert all(answer[len(e.answer)] == 2 for e, answer in zip(data.examples, answers.tolist(), strict=True))
    generated = torch.where(answers == PAD, 7, answers)
    generated[5, 1] = 0  # a wrong digit
    generated[6, len(data.examples[6].answer)] = 7  # no end
    is_right = exact_match.compare_tokens(generated, answers, PAD).all(1)
    assert (~is_right).nonzero().flatten().tolist() == [5, 6]
