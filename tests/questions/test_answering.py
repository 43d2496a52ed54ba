"""The task rpe_answers: rows, batches, loss, mixtures, training from a checkpoint, answers in validation."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model, run_here
from fairseq.trainer import Trainer
from prepared_folder import asked_set, make_folder, make_sets, questions, vocabulary
from refusal import refusal, refused
from training import train

import fairseq_rpe.models  # noqa: F401  (registers)
from fairseq_rpe.attention.forward import positions_from_padding
from fairseq_rpe.criterions.answer_cross_entropy import AnswerCrossEntropy
from fairseq_rpe.data.folder import QUESTIONS_MANIFEST as MANIFEST
from fairseq_rpe.data.folder import count_tokens
from fairseq_rpe.questions import dataset
from fairseq_rpe.questions.dataset import Question
from fairseq_rpe.runs.progress_view import TerminalProgressView
from fairseq_rpe.tasks.question_answering import QuestionAnsweringConfig, QuestionAnsweringTask

PAD, EOS = 1, 2


def task_of(folder: Path, length: int = 128, **changes) -> QuestionAnsweringTask:
    usual = {"data": str(folder), "tokens_per_sample": length, "train_subset": "train", "finetune_from_model": None}
    return QuestionAnsweringTask.setup_task(QuestionAnsweringConfig(**{**usual, "seed": 1, **changes}))


def rows_of(folder: Path, split: str = "train", length: int = 128, **changes):
    task = task_of(folder, length, **changes)
    task.load_dataset(split)
    return task.dataset(split)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """One set: 8 questions to learn from, 11 answers to them, and 4 to be asked."""
    folder = tmp_path_factory.mktemp("made") / "questions"
    make_folder(folder)
    return folder


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """Three sets of different sizes: means over questions, over groups, and of ROUGE."""
    folder = tmp_path_factory.mktemp("several") / "questions"
    parts = {"large": (30, ("f1",)), "small": (4, ("group_em", "accuracy")), "middle": (10, ("rgm",))}
    sets = [
        asked_set(name, {"train": questions(number), "valid": questions(5, start=number)}, metrics, 12)
        for name, (number, metrics) in parts.items()
    ]
    make_sets(folder, sets)
    return folder


def test_a_row_is_question_answer_and_end(made):
    data, folder = rows_of(made, length=512), dataset.load_dataset(made)
    rows = folder.split("train")
    assert len(data) == sum(len(row.answers) for row in rows) > len(rows)
    at = 0
    for question in rows:
        for answer in question.answers:
            row, prompt = data.row(at)
            read = rows.text(question.prompt) + rows.text(question.document) + rows.text(question.cue)
            assert rows.decode(row[:prompt].tolist()) == read
            assert rows.decode(row[prompt:-1].tolist()) == rows.text(answer) and row[-1] == EOS
            assert data.size(at) == len(row) - 1 and data.question(at) == question
            at += 1
    valid = rows_of(made, "valid")
    assert len(valid) == len(folder.split("valid"))
    assert valid.ordered_indices().tolist() == np.argsort(valid.sizes, kind="stable").tolist()


def test_a_batch_marks_the_answer_and_needs_no_mask(made):
    """Attention is as fast as without padding: rows are padded at their end alone, which causality hides."""
    data = rows_of(made)
    batch = data.collater([data[i] for i in range(len(data))])
    tokens, target = batch["net_input"]["src_tokens"], batch["target"]
    for i in range(len(data)):
        row, prompt = data.row(i)
        answer = batch["answer"][i]
        assert target[i][answer].tolist() == row[prompt:].tolist()
        assert tokens[i, : len(row) - 1].tolist() == row[:-1].tolist() and (tokens[i, len(row) - 1 :] == PAD).all()
    assert batch["ntokens"] == data.sizes.sum() and data.collater([]) == {} and tokens.eq(PAD).any()
    positions, padding = positions_from_padding(tokens.eq(PAD), tokens.shape[1], masks_end=False)
    assert padding is None and positions.contiguous


@pytest.mark.parametrize("truncate", ["end", "start", "middle"])
def test_no_row_is_longer_than_it_may_be(made, truncate, caplog):
    with caplog.at_level("INFO"):
        data = rows_of(made, length=64, truncate=truncate, eval_answers=False)
    [said] = [record.message for record in caplog.records if record.message.startswith("train: ")]
    whole = rows_of(made, length=512)
    cut_ones, lost = 0, 0
    for i in range(len(data)):
        (row, prompt), (before, prompt_before) = data.row(i), whole.row(i)
        assert len(row) <= 64 and data.size(i) == len(row) - 1
        assert prompt == min(prompt_before, 64 - 16)
        text = data.rows.decode(row[:prompt].tolist())
        assert text.startswith("Who mended the wheel?\n\n") and text.endswith("\n\nAnswer:")
        assert row[prompt:].tolist() == before[prompt_before:].tolist()
        if data._answer_indices[i] == 0:  # its first answer
            cut_ones, lost = cut_ones + (prompt < prompt_before), lost + prompt_before - prompt
    number = len(data.rows)
    assert 0 < cut_ones < number
    told = f"train: {len(data)} rows of {number} questions, at most 64 tokens each; {cut_ones} questions ("
    assert (
        said
        == f"{told}{100 * cut_ones / number:.1f} %) are truncated at the document's {truncate} and lose {lost} tokens"
    )


def test_what_does_not_fit_is_refused(made, tmp_path):
    for why, folder, changes in (
        ("has no split 'test': it has train, valid", made, {"split": "test"}),
        ("--add-bos-token has no effect", made, {"add_bos_token": True}),
        (r"data \S+: no dict\.txt there", tmp_path, {}),
        (r"has no answers\.json: make such a folder with fairseq-rpe", vocabulary(tmp_path / "text"), {}),
    ):
        with refused(why):
            rows_of(folder, **changes)


def test_long_answers_are_learned_as_far_as_their_set_allows(tmp_path, caplog):
    long = Question("q0", "Who?\n", ("Old Tamsin mended the wheel in March, said Bren.",))
    make_folder(tmp_path / "q", {"train": [long, *questions(2, 1)], "valid": questions(2, 3)}, answer_tokens=6)
    with caplog.at_level("INFO"):
        data = rows_of(tmp_path / "q")
    assert "1 answers are longer than their set allows" in caplog.text
    row, prompt = data.row(0)
    answer = data.rows.tokens(data.rows[0].answers[0])
    assert row[prompt:].tolist() == [*answer[:5].tolist(), EOS] and data.size(0) == len(row) - 1


def losses(model, data, indices, task) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, sample size and gradients of one batch."""
    model.zero_grad()
    loss, size, _ = AnswerCrossEntropy(task)(model, data.collater([data[i] for i in indices]))
    loss.backward()
    return loss.item(), size, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("spec", ["alibi", "fire", "rope:scaling=dynamic_ntk,original_length=64"])
def test_the_loss_of_a_padded_batch_is_that_of_its_rows(made, spec):
    """And so are its gradients, in whatever parts the rows come: they count by their answers' tokens."""
    task = task_of(made)
    task.load_dataset("train")
    data, model = task.dataset("train"), make_model(task, spec)
    every = range(len(data))
    loss, size, gradients = losses(model, data, every, task)
    assert size == sum(len(row) - prompt for row, prompt in map(data.row, every))
    for parts in ([[i] for i in every], [[0, 5], [1, 2, 3, 4], list(every)[6:]]):
        found = [losses(model, data, part, task) for part in parts]
        assert loss == pytest.approx(sum(one[0] for one in found), rel=1e-6)
        assert size == sum(one[1] for one in found)
        for name, gradient in gradients.items():
            torch.testing.assert_close(sum(one[2][name] for one in found), gradient, rtol=1e-4, atol=1e-5)


def epoch_of(folder: Path, epoch: int = 1, split: str = "train", seed: int = 1, **given) -> list[list[int]]:
    """The rows of an epoch, batch by batch, as a trainer gets them."""
    sizes = {name: given.pop(name) for name in ("max_tokens", "max_sentences") if name in given}
    task = task_of(folder, **given)
    task.load_dataset(split)
    iterator = task.get_batch_iterator(task.dataset(split), seed=seed, epoch=epoch, max_positions=2**31 - 1, **sizes)
    return [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=split == "train")]


def test_batches_are_full_and_of_similar_length(several):
    sizes = rows_of(several).sizes
    batches = epoch_of(several, max_tokens=400)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))  # each row once
    filled = [len(batch) * sizes[batch].max() for batch in batches]
    assert max(filled) <= 400
    padding = 1 - sizes.sum() / sum(filled)
    shuffled = np.random.default_rng(0).permutation(len(sizes)).reshape(-1, 5)
    assert padding < 0.1 < 1 - sizes.sum() / (5 * sizes[shuffled].max(1)).sum()
    assert [sizes[batch].max() for batch in batches] != sorted(sizes[batch].max() for batch in batches)
    assert all(len(batch) <= 3 for batch in epoch_of(several, max_tokens=400, max_sentences=3))
    valid = epoch_of(several, split="valid", max_sentences=4)
    assert sorted(i for batch in valid for i in batch) == list(range(15))
    with refused(r"--max-tokens 60 is less than a row of \d+ tokens: raise it"):
        epoch_of(several, max_tokens=60)


def test_an_epoch_follows_from_the_seed(several):
    first, second = (epoch_of(several, epoch, max_tokens=400) for epoch in (1, 2))
    assert first == epoch_of(several, max_tokens=400) != epoch_of(several, max_tokens=400, seed=2)
    assert set(map(frozenset, first)) != set(map(frozenset, second))


def test_a_mixture_is_stated_and_kept(several, caplog):
    with caplog.at_level("INFO"):
        data = rows_of(several, mixture="large=1,small=1,middle=2")
    there = {name: sum(row.set == name for row in map(data.question, range(len(data)))) for name in data.sets}
    total, parts = sum(there.values()), {"large": 0.25, "small": 0.25, "middle": 0.5}
    wanted = {name: round(total * share) for name, share in parts.items()}
    told = ", ".join(
        f"{name} {count} rows ({100 * count / sum(wanted.values()):.2f} %, each {count / there[name]:.3g} times)"
        for name, count in wanted.items()
    )
    assert f"mixture large=1,small=1,middle=2: an epoch has {told}" in caplog.messages
    seen = []
    for epoch in (1, 2, 3):
        data.set_epoch(epoch)
        chosen = data.ordered_indices()
        names = [data.question(i).set for i in chosen]
        assert {name: names.count(name) for name in parts} == wanted
        seen.append(chosen)
    assert not data.can_reuse_epoch_itr_across_epochs
    large = [i for i in np.concatenate(seen) if data.question(i).set == "large"]
    assert len(set(large[: there["large"]])) >= min(there["large"], wanted["large"])
    left_out = rows_of(several, mixture="large=0,small=1,middle=1")
    assert {left_out.question(i).set for i in left_out.ordered_indices()} == {"small", "middle"}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path)["model"]


def test_batches_that_are_added_up_are_one_batch(made, tmp_path):
    """Of rows with different numbers of answer tokens, in three parts, the update is that of all together."""
    flags = {"max_tokens": None, "optimizer": "nag", "lr": 0.2, "disable_validation": True}
    one = weights(train(made, tmp_path / "one", 1, batch_size=20, **flags))
    two = weights(train(made, tmp_path / "two", 1, batch_size=4, update_freq=3, **flags))
    begun = weights(train(made, tmp_path / "begun", 1, batch_size=20, **{**flags, "lr": 1e-9}))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
    assert any((one[name] - begun[name]).abs().max() > 1e-3 for name in one)


@pytest.fixture
def one_thread():
    """A copy of a process has none of its threads, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_sigkill_and_resume_is_bit_equal(several, tmp_path, monkeypatch):
    """A copy of this process is killed in the second epoch, after an update that no checkpoint has."""
    flags = {"mixture": "capped:6", "dropout": 0.1, "max_tokens": 800, "disable_validation": True}
    flags |= {"save_interval_updates": 2, "keep_interval_updates": 1}
    whole = weights(train(several, tmp_path / "whole", 14, **flags))
    step = Trainer.train_step

    def killed(self, *args, **kwargs):
        if self.get_num_updates() == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **kwargs)

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            monkeypatch.setattr(Trainer, "train_step", killed)
            train(several, tmp_path / "killed", 14, **flags)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    left = torch.load(tmp_path / "killed" / "checkpoint_last.pt")
    assert left["optimizer_history"][-1]["num_updates"] == 10 and left["extra_state"]["train_iterator"]["epoch"] == 2
    resumed = weights(train(several, tmp_path / "killed", 14, **flags))
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


@pytest.fixture(scope="module")
def begun(made, tmp_path_factory) -> Path:
    """A checkpoint to begin with, of the same vocabulary, trained at 96 tokens."""
    return train(made, tmp_path_factory.mktemp("begun"), 2, tokens_per_sample=96, share_decoder_input_output_embed=True)


def test_it_begins_with_the_weights_of_a_checkpoint(made, begun, tmp_path):
    said: list[str] = []
    flags = {"share_decoder_input_output_embed": True, "disable_validation": True, "lr": 1e-12}
    found = weights(train(made, tmp_path / "a", 1, begun, said, rpe_train_length=96, **flags))
    for name, value in weights(begun).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert not any("was trained at" in line for line in said)
    train(made, tmp_path / "b", 1, begun, said, **flags)
    wanted = f"{begun} was trained at 96 tokens; encodings that use the training length now use 128: give"
    assert any(line.startswith(wanted) for line in said)


def test_the_tuned_model_reads_text_too(made, begun, tmp_path):
    text = tmp_path / "text"  # with the same vocabulary
    shutil.copytree(made, text, ignore=shutil.ignore_patterns(MANIFEST, "*.jsonl"))
    done = run_here("eval", begun, text, "--split", "valid", "--lengths", "64", "--device", "cpu", "--json")
    [row] = map(json.loads, done.stdout.splitlines())
    assert row["tokens"] == count_tokens(text, "valid") and 1 < row["ppl"] < 1e6


@pytest.mark.parametrize(
    "words",
    ["eval {} --lengths 64 --device cpu", "sliding {} --device cpu", "erf {} --out", "extend {} --tokens 256 --out"],
)
def test_questions_are_not_read_as_one_text(words, made, begun, tmp_path):
    command, *options = words.format(begun).split()
    more = [tmp_path / "out"] if options[-1] == "--out" else []
    said = refusal(command, options[0], made, "--split", "valid", *options[1:], *more)
    why = f"use fairseq-rpe train {made} --init-from {begun}" if command == "extend" else f"{made} holds questions"
    assert why in said and not (tmp_path / "out").exists()


def test_another_dictionary_is_refused(begun, tmp_path):
    """Of about the same size: by the task, and by the command before it."""
    other, why = tmp_path / "q", "was trained with another vocabulary than"
    make_folder(other, vocab=vocabulary(tmp_path / "v", size=299))
    with refused(why):
        train(other, tmp_path / "a", 1, begun)
    assert why in refusal("train", other, "--init-from", begun, "--rpe", "alibi", "--out", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_is_shown_of_a_validation_names_the_answers(tmp_path, capsys):
    view = TerminalProgressView("alibi", tmp_path, 12, 0)
    view.on_line('x | valid | {"valid_loss": "1.5", "valid_answers": "22.619", "valid_num_updates": "12"}')
    assert "update 12: validation loss 1.500 bits per token, answers 22.62" in "".join(capsys.readouterr())


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def words_of(*given: object) -> list[str]:
    """The command line of a training that would be started."""
    return shlex.split(run_here("train", "--dry-run", *given).stdout)


def test_the_command_takes_a_folder_of_questions(made, tmp_path):
    common = [made, "--rpe", "rope", "--out", tmp_path / "run", "--tokens"]
    words = words_of(*common, 128, "--", "--truncate", "middle", "--mixture", "equal", "--max-tokens", "4096")
    flags = "--task --criterion --tokens-per-sample --truncate --mixture --max-tokens".split()
    assert [flag(words, name) for name in flags] == "rpe_answers answer_cross_entropy 128 middle equal 4096".split()
    assert "--sample-break-mode" not in words and "--mixture" not in words_of(*common, 128)


@pytest.mark.parametrize(
    ("tokens", "further", "words"),
    [
        (128, ["--mixture", "evenly"], "--mixture evenly is not one of proportional, equal"),
        (
            128,
            ["--truncate", "start", "--mixture=made=1,no=2"],
            "--mixture names 'no', which is not a set of this folder",
        ),
        (128, ["--truncate", "top"], "--truncate top is not one of"),
        (20, [], "of made takes "),
        (16, [], "16 tokens leave no room for a question: answers of made take up to 16"),
    ],
)
def test_a_training_that_cannot_be_leaves_no_folder(made, tmp_path, tokens, further, words):
    given = [made, "--rpe", "rope", "--out", tmp_path / "run", "--tokens", tokens, "--", *further]
    assert words in refusal("train", *given) and not (tmp_path / "run").exists()


def test_the_command_takes_over_what_the_checkpoint_has(made, begun, tmp_path):
    common = [made, "--out", tmp_path / "run", "--tokens", "512", "--init-from", begun, "--rpe"]
    words = words_of(*common, "rope:scaling=linear,factor=4", "--dropout", "0.2")
    expected = {"finetune-from-model": begun, "rpe-train-length": 96, "tokens-per-sample": 512, "dropout": 0.2}
    expected |= {"rpe": "rope:scaling=linear,factor=4", "decoder-embed-dim": 32, "decoder-layers": 1}
    assert {name: flag(words, f"--{name}") for name in expected} == {name: str(v) for name, v in expected.items()}
    assert "--share-decoder-input-output-embed" in words
    longer = ["--", "--rpe-train-length", "300"]
    words = words_of(*common, "alibi", *longer)
    assert words.count("--rpe-train-length") == 1 and flag(words, "--rpe-train-length") == "300"
    assert flag(words, "--decoder-layers") == "1" and flag(words, "--arch") == "transformer_rpe_lm_tiny"
    assert words_of(*common, "alibi", "--arch", "tiny", *longer) == words
    words = words_of(*common, "alibi", "--", "--decoder-embed-dim", "32", "--decoder-layers", "2")
    assert flag(words, "--decoder-layers") == "2" and "--decoder-ffn-embed-dim" not in words
    said = refusal("train", *common, "kerple_log")
    assert f"--rpe kerple_log has other parameters than {begun} has learned with 'alibi'" in said
    assert "none.pt" in refusal("train", *common[:-2], tmp_path / "none.pt", "--rpe", "alibi")


def test_positions_are_the_checkpoints_unless_said(made, tmp_path):
    moved = train(made, tmp_path / "moved", 1, positions_train="shape:max_position=9", positions_eval="offset:tokens=3")
    common = [made, "--out", tmp_path / "run", "--tokens", "128", "--init-from", moved, "--rpe", "alibi"]
    both = "--positions-train", "--positions-eval"
    assert [flag(words_of(*common), name) for name in both] == ["shape:max_position=9", "offset:tokens=3"]
    words = words_of(*common, "--positions-train", "identity")
    assert flag(words, "--positions-train") == "identity" and "--positions-eval" not in words
    words = words_of(*common, "--positions-eval", "offset:tokens=5")
    assert [flag(words, name) for name in both] == ["shape:max_position=9", "offset:tokens=5"]


def test_answers_choose_the_best_checkpoint(several, tmp_path):
    said: list[str] = []
    flags = {"eval_answers": True, "best_checkpoint_metric": "answers", "maximize_best_checkpoint_metric": True}
    train(several, tmp_path, 2, said=said, save_interval_updates=1, batch_size_valid=8, **flags)
    logged = [line for line in said if "valid on 'valid' subset" in line and "| answers " in line]
    assert logged
    found = {name: [float(re.search(rf"\| {name} ([\d.]+)", line)[1]) for line in logged] for name in ANSWERS}
    for mean, *each in zip(*found.values(), strict=True):
        assert mean == pytest.approx(sum(each) / 3, abs=2e-3)
    best = torch.load(tmp_path / "checkpoint_best.pt")["extra_state"]
    assert best["best"] == pytest.approx(max(found["answers"]), abs=2e-3)


ANSWERS = ("answers", "answers_large", "answers_small", "answers_middle")


def test_what_cannot_answer_while_it_is_trained_is_refused(several, tmp_path):
    with refused("follows the length of the text"):
        train(several, tmp_path, 1, eval_answers=True, rpe="rope:scaling=dynamic_ntk,original_length=64")
    with refused("the answers of 'train', the training split, are not scored: leave it out of --valid-subset"):
        task_of(several, eval_answers=True, valid_subset="valid,train")


def test_scores_that_do_not_add_up_are_left_out(tmp_path):
    splits = {s: [q for q in questions(4, n) if q.choices] for s, n in (("train", 0), ("valid", 4))}
    make_sets(tmp_path / "q", [asked_set(metric, splits, (metric,), 8) for metric in ("matthews", "f1")])
    said: list[str] = []
    train(tmp_path / "q", tmp_path / "run", 1, said=said, eval_answers=True)
    assert "matthews is scored by matthews, which is no mean over questions: 'answers' leaves it out" in said
    [last] = [line for line in said if "valid on 'valid' subset" in line and "| answers " in line]
    assert "answers_f1" in last and "answers_matthews" not in last
    make_folder(tmp_path / "p", splits, metrics=("matthews",))
    with refused("--eval-answers: no set of the data is scored by a mean over questions"):
        train(tmp_path / "p", tmp_path / "other", 1, eval_answers=True)


def test_a_process_with_nothing_left_logs_the_same_sums(several):
    """fairseq gives it rows of the training, whose sets and groups may be others; it counts none of them."""
    task = task_of(several, eval_answers=True)
    for split in ("train", "valid"):
        task.load_dataset(split)
    task.get_batch_iterator(task.dataset("valid"), max_sentences=4)
    model, criterion = make_model(task, "alibi"), AnswerCrossEntropy(task)
    logs = []
    for split in ("valid", "train"):
        data = task.dataset(split)
        logs.append(task.valid_step(data.collater([data[i] for i in range(4)]), model, criterion)[2])
    real, idle = ({k: v for k, v in log.items() if k.startswith("_answers_")} for log in logs)
    assert {name: value.shape for name, value in real.items()} == {name: value.shape for name, value in idle.items()}
    assert len(real) == 3 and sum(v.sum() for v in real.values()) > 0 and not any(v.any() for v in idle.values())
