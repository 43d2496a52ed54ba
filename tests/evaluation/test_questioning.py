"""``answer``: questions by context length, against full passes and metrics computed here; stops and refusals."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TRAIN_FLAGS, run_here
from measuring import EOS, PAD, refusal, rows_of, without_seconds
from prepared_folder import asked_set, make_folder, make_sets, questions, vocabulary

from fairseq_rpe.core import UserError
from fairseq_rpe.evaluation import question_answering
from fairseq_rpe.evaluation.example_scores import unpack_scores
from fairseq_rpe.evaluation.question_records import score_by_distance
from fairseq_rpe.questions import dataset, prompt
from fairseq_rpe.questions.dataset import Question
from fairseq_rpe.questions.metrics import AnsweredQuestion, score
from fairseq_rpe.questions.prompt import build_prompt
from fairseq_rpe.utils import files, json_files

WRITTEN = 16  # tokens of an answer in prepared_folder
WEATHER = [
    Question(f"w{i}", "Did it rain? ", (("yes", "no")[i % 2],), "It was grey. " * i, "", "", ("no", "yes"))
    for i in range(1, 8)
]


def written_at(folder, stem):
    """The file of answers of a set and length."""
    (path,) = folder.glob(f"{stem}-*.json")
    return path


def save_untrained(path: Path, data: Path, rpe: str = "fire", **changes: object) -> Path:
    """What a training of no updates would leave, with weights that make predictions differ clearly."""
    import fairseq_rpe.models  # noqa: F401

    # isort: split
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    flags = [str(data), *TRAIN_FLAGS, "--rpe", rpe]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), flags))
    torch.manual_seed(5)  # answers of all lengths, some of them empty
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    with torch.no_grad():
        for part in model.decoder.layers.parameters():
            part.mul_(6 if part.dim() > 1 else 1)
        model.decoder.output_projection.weight[EOS] += 0.6 * torch.randn(32)
    settings = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    settings["model"].update(changes)
    history = [{"criterion_name": "x", "optimizer_name": "y", "lr_scheduler_state": {}, "num_updates": 0}]
    state = {"args": None, "cfg": settings, "model": model.state_dict(), "optimizer_history": history}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**state, "task_state": {}, "extra_state": {}, "last_optimizer_state": None}, path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two sets: one of words with answers of its own, one of a classification."""
    folder = tmp_path_factory.mktemp("questions")
    asked = {"train": questions(2), "valid": questions(11, start=8)}
    weather = asked_set("weather", {"valid": WEATHER}, ("accuracy", "matthews", "binary_f1"), 6)
    make_sets(folder / "data", [asked_set("mill", asked, ("f1", "em", "rouge1", "rgm")), weather])
    return folder / "data"


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("untrained") / "checkpoint.pt", data)


@pytest.fixture(scope="module")
def model(checkpoint, data):
    from fairseq import checkpoint_utils

    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    return model.eval()


def read_by_model(data: Path, name: str, length: int, written: int = WRITTEN, cut: str = "end"):
    """Of each question of a set: its row, what is read of it, and how many tokens are left out."""
    rows = dataset.load_dataset(data).split("valid")
    found = []
    for row in rows:
        if row.set == name:
            parts = [rows.tokens(item) for item in (row.prompt, row.document, row.cue)]
            found.append((row, *build_prompt(*parts, length - written, cut)))
    return rows, found


@torch.no_grad()
def log_probs(model, row):
    scores = torch.log_softmax(model(torch.tensor([row]))[0][0], -1)
    scores[:, PAD] = -torch.inf
    return scores


def test_answers_are_those_of_full_passes(data, checkpoint, model, tmp_path, monkeypatch):
    """And scores those of the answers."""
    written: dict[tuple[int, ...], list[int]] = {}
    real = question_answering.greedy_search

    def kept(model, prompts, *rest):
        found = real(model, prompts, *rest)
        written.update({tuple(map(int, prompt)): tokens for prompt, tokens in zip(prompts, found, strict=True)})
        return found

    monkeypatch.setattr(question_answering, "greedy_search", kept)
    out, texts = tmp_path / "rows.jsonl", tmp_path / "texts"
    flags = ["--lengths", "80,180", "--sets", "mill", "--out", out, "--predictions", texts]
    lines = rows_of("eval-questions", checkpoint, data, *flags)
    assert lines == json_files.read_json_lines(out) and [line["length"] for line in lines] == [80, 180]
    cut = []
    for line in lines:
        rows, asked = read_by_model(data, "mill", line["length"])
        given = json.loads(written_at(texts, f"mill-{line['length']}").read_text())
        assert list(given) == [row.id for row, _, _ in asked]  # in the order of the set
        for row, read, _ in asked:
            prompt, tokens = list(map(int, read)), written[tuple(map(int, read))]
            assert given[row.id] == rows.decode(tokens).strip()
            whole = [*tokens, EOS][: WRITTEN - 1]
            assert log_probs(model, prompt + whole[:-1])[len(prompt) - 1 :].argmax(-1).tolist() == whole
        assert len(set(given.values())) > 3
        items = [
            AnsweredQuestion(given[row.id], tuple(rows.text(a).strip() for a in row.answers)) for row, _, _ in asked
        ]
        assert line["metrics"] == {name: score(name, items) for name in ("f1", "em", "rouge1", "rgm")}
        assert (line["published"], line["score"]) == ("f1", line["metrics"]["f1"])
        scores = unpack_scores(line["question_scores"], 11)
        assert scores.tolist() == pytest.approx([score("f1", [item]) for item in items], abs=0.005)
        assert line["questions"] == len(asked) == 11
        cut.append((line["truncated_documents"], line["lost_tokens"]))
        assert cut[-1] == (sum(lost > 0 for _, _, lost in asked), sum(lost for _, _, lost in asked))
        assert line["empty"] == sum(not text for text in given.values())
        known = {
            "encoding": "fire",
            "suite": "own",
            "split": "valid",
            "transform": "identity",
            "answer_mode": "generation",
        }
        known |= {
            "truncate": "end",
            "checkpoint": files.sha256_of_files(checkpoint),
            "data": dataset.dataset_digest(data),
        }
        assert known.items() <= line.items() and line["beam"] == 1 and "length_penalty" not in line
    assert 11 > cut[0][0] > cut[1][0] > 0

    # known results are not computed again, and keep their answers
    before = out.read_bytes()
    assert rows_of("eval-questions", checkpoint, data, *flags) == lines and out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "texts"]
    # others are added: another end of the document, a beam
    (start,) = rows_of("eval-questions", checkpoint, data, *flags[2:6], "--lengths", 80, "--truncate", "start")
    (wide,) = rows_of("eval-questions", checkpoint, data, *flags[2:6], "--lengths", 80, "--beam", 2)
    assert start["lost_tokens"] == wide["lost_tokens"] == lines[0]["lost_tokens"]
    assert (start["truncate"], wide["beam"], wide["length_penalty"]) == ("start", 2, 1.0)
    assert json_files.read_json_lines(out) == [*lines, start, wide]


def test_scores_by_the_distance_of_the_answer(checkpoint, tmp_path):
    """Of questions whose distances are on record: eight groups from near to far, whatever their order in the file."""
    order = [5, 18, 0, 11, 3, 16, 9, 1, 14, 7, 12, 4, 17, 2, 10, 15, 6, 13, 8]
    asked = [replace(one, distance=10 * place) for one, place in zip(questions(19), order, strict=True)]
    folder = make_folder(tmp_path / "data", {"train": questions(2, start=30), "valid": asked}, metrics=("rouge1",))
    texts = tmp_path / "texts"
    (line,) = rows_of("eval-questions", checkpoint, tmp_path / "data", "--lengths", 180, "--predictions", texts)
    given = json.loads(written_at(texts, "made-180").read_text())
    near = sorted(asked, key=lambda one: one.distance)
    groups = [near[0:2], near[2:4], near[4:7], near[7:9], near[9:11], near[11:14], near[14:16], near[16:19]]
    for own, band in zip(groups, line["distances"], strict=True):
        points = score("rouge1", [AnsweredQuestion(given[one.id], one.answers) for one in own])
        ends = {"least": own[0].distance, "most": own[-1].distance}
        assert band == {**ends, "questions": len(own), "score": points}
    whole = sum(band["questions"] * band["score"] for band in line["distances"]) / 19
    assert whole == pytest.approx(line["score"])
    items = [AnsweredQuestion(text, ("Bren",)) for text in given.values()]
    assert folder.sets["made"].published == "rouge1" and len(score_by_distance("em", items, list(range(19)))) == 8
    # equal distances stand together
    alike = score_by_distance("em", items, [0] * 6 + [7] * 12 + [9])
    assert [(one.least, one.most, one.questions) for one in alike] == [(0, 0, 6), (7, 7, 12), (9, 9, 1)]
    assert (
        score_by_distance("em", items, [None, *range(18)])
        == score_by_distance("matthews", items, list(range(19)))
        == ()
    )


def test_batches_change_nothing(data, checkpoint, tmp_path, monkeypatch):
    found = []
    for sizes in ((3, 256**3, 1 << 15), (256, 60**2 * 2, 1 << 15), (256, 256**3, 200), (1, 1, 1)):
        for name, size in zip(("_MAX_ROWS", "_MAX_PAIRS", "_MAX_TOKENS"), sizes, strict=True):
            monkeypatch.setattr(question_answering, name, size)
        found.append(without_seconds(rows_of("eval-questions", checkpoint, data, "--lengths", "90")))
    assert all(one == found[0] for one in found) and [row["set"] for row in found[0]] == ["mill", "weather"]


@pytest.mark.parametrize(("by", "rows"), [("generation", 3), ("likelihood", 6)])  # two choices each
def test_a_stop_loses_a_batch_at_most(data, checkpoint, tmp_path, monkeypatch, by, rows):
    monkeypatch.setattr(question_answering, "_MAX_ROWS", rows)
    flags = [
        checkpoint,
        data,
        "--lengths",
        "56,90",
        "--answer-mode",
        by,
        "--sets",
        "weather",
        "--predictions",
        tmp_path / "p",
    ]
    whole = rows_of("eval-questions", *flags, "--out", tmp_path / "whole.jsonl")
    texts = written_at(tmp_path / "p", "weather-90").read_bytes()
    written_at(tmp_path / "p", "weather-90").unlink()
    out, real, asked = tmp_path / "rows.jsonl", question_answering._answer_batch, []

    def stopped(model, key, rows, info, batch, tick):
        asked.append((key.length, *batch.ids))
        if len(asked) == 5:  # of three batches the second of the second length
            raise KeyboardInterrupt
        return real(model, key, rows, info, batch, tick)

    monkeypatch.setattr(question_answering, "_answer_batch", stopped)
    done = run_here("eval-questions", *flags, "--out", out, "--device", "cpu", "--json", ok=False)
    assert done.returncode == 130 and len(done.stdout.splitlines()) == 1 == len(json_files.read_json_lines(out))
    (kept,) = tmp_path.glob("rows.jsonl.weather-90-*.partial")
    assert len(kept.read_bytes().splitlines()) == 1
    with open(kept, "ab") as file:  # a kill while a line was written
        file.write(b'{"answers": {"w1": "y')
    again = rows_of("eval-questions", *flags, "--out", out)
    assert again == json_files.read_json_lines(out) and without_seconds(again) == without_seconds(whole)
    assert sorted(asked) == sorted([*asked[:4], *asked[5:], asked[5]]) and asked[4] == asked[5] and len(asked) == 7
    assert written_at(tmp_path / "p", "weather-90").read_bytes() == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "rows.jsonl", "whole.jsonl"]


def test_a_table_is_printed(data, checkpoint):
    words = ("eval-questions", checkpoint, data, "--lengths", "56", "--sets", "weather")
    (row,) = rows_of(*words)
    done = run_here(*words, "--device", "cpu")
    head, line = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
    assert head == ["set", "length", "score %", "questions", "shortened", "seconds", "metrics %"]
    assert line[:4] == ["weather", "56", f"{row['score']:.2f}", str(row["questions"])]
    assert line[6] == ", ".join(f"{name} {value:.2f}" for name, value in row["metrics"].items())


def test_a_result_that_could_not_be_kept_is_not_forgotten(data, checkpoint, tmp_path, monkeypatch):
    """What was answered is still there when there is room for the result."""
    out, real = tmp_path / "rows.jsonl", json_files.append_json_line
    monkeypatch.setattr(json_files, "append_json_line", lambda *_: (_ for _ in ()).throw(OSError(28, "full", str(out))))
    words = ("eval-questions", checkpoint, data, "--lengths", "56", "--sets", "weather", "--out", out)
    done = run_here(*words, "--device", "cpu", "--json", ok=False)
    assert done.returncode == 2 and len(done.stdout.splitlines()) == 1 and "no space left" in done.stderr
    monkeypatch.setattr(json_files, "append_json_line", real)
    monkeypatch.setattr(question_answering, "_answer_batch", None)
    rows = rows_of(*words)
    assert without_seconds(rows) == without_seconds([json.loads(done.stdout)])
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_answers_of_different_questions_are_kept_apart(data, checkpoint, tmp_path):
    """One folder takes the answers of all ways to answer and lengths, each in a file; a known result needs its own."""
    words = ("eval-questions", checkpoint, data, "--sets", "weather", "--out", tmp_path / "rows.jsonl")
    for more in (["--lengths", "56,90"], ["--lengths", "56", "--answer-mode", "likelihood"]):
        rows_of(*words, "--predictions", tmp_path / "p", *more)
    assert sorted(p.name.split("-")[1] for p in (tmp_path / "p").iterdir()) == ["56", "56", "90"]
    said = refusal(*words, "--lengths", 56, "--predictions", tmp_path / "other")
    assert "has the result of weather at 56 tokens, but --predictions does not have its answers" in said


def test_the_likeliest_choice(data, checkpoint, model, tmp_path):
    """By sums over the tokens of a choice and its end, of full passes."""
    flags = ["--sets", "weather", "--lengths", 40, "--answer-mode", "likelihood", "--predictions", tmp_path]
    (line,) = rows_of("eval-questions", checkpoint, data, *flags)
    rows, asked = read_by_model(data, "weather", 40, 6)
    given = json.loads(written_at(tmp_path, "weather-40").read_text())
    items = []
    for row, read, _ in asked:
        sums = []
        for choice in row.choices:
            whole = [*map(int, read), *map(int, rows.tokens(choice)), EOS]
            scores = log_probs(model, whole)[len(read) - 1 : -1]
            sums.append(float(scores.gather(1, torch.tensor(whole[len(read) :])[:, None]).sum()))
        assert given[row.id] == rows.text(row.choices[sums.index(max(sums))]).strip() in ("yes", "no")
        items.append(AnsweredQuestion(given[row.id], (rows.text(row.answers[0]).strip(),), "", ("no", "yes")))
    right = sum(item.prediction in item.answers for item in items)
    assert line["metrics"]["accuracy"] == 100 * right / 7 and line["answer_mode"] == "likelihood" and line["empty"] == 0
    assert line["undefined"] == (["matthews"] if len(set(given.values())) == 1 else [])


def test_other_positions_and_encodings(data, checkpoint, tmp_path):
    base = [checkpoint, data, "--sets", "weather"]
    one, two = rows_of("eval-questions", *base, "--lengths", "24,64", "--positions-eval", "interpolate")
    assert (one["transform"], two["transform"]) == ("identity", "interpolate:ratio=0.5")
    assert two["positions"] == "interpolate"
    flags = ["--lengths", 40, "--positions-eval", "randomized:max_position=64"]
    rows = [rows_of("eval-questions", *base, *flags)[0] for _ in range(2)]
    assert without_seconds(rows[:1]) == without_seconds(rows[1:]) and rows[0]["draws"] == 1
    (row,) = rows_of("eval-questions", *base, "--lengths", 40, "--rpe", "fire:exact=true", "--compute-dtype", "bf16")
    assert (row["rpe"], row["encoding"], row["compute_dtype"]) == ("fire:exact=true", "fire", "bf16")


REFUSALS = [
    ("--lengths 40 --sets mil", "--sets mil: .*did you mean 'mill'"),
    ("--lengths 40 --sets mill,mill", "names a set twice"),
    ("--lengths 90 --predictions dict.txt", "--predictions"),
    ("--lengths 40 --split test", "--split test: mill has no answers in this split: use train, valid"),
    ("--lengths 90 --split train", "--split train: weather has no answers in this split"),
    ("--lengths 90,16", "16 tokens leave no room for a question: answers of mill take up to 16"),
    ("--lengths 90,20 --sets mill", "question 'q8' of mill takes .* where 4 may be read: give a greater length"),
    (
        "--lengths 90 --answer-mode likelihood --sets mill",
        "question 'q9' of mill has no choices .*use --answer-mode generation",
    ),
    ("--lengths 90 --answer-mode likelihood --beam 2", "--beam needs --answer-mode generation"),
    ("--lengths 90 --length-penalty 1", "--length-penalty needs a beam"),
    ("--lengths 90 --beam 2 --length-penalty 1e308", "--length-penalty 1e\\+308 is out of range: use 0 to 10"),
    ("--lengths 40,90 --positions-eval randomized:max_position=64 --sets weather", "raise max_position to at least 90"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSALS)
def test_refusals_in_one_line(data, checkpoint, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(data)
    assert re.search(
        words, refusal("eval-questions", checkpoint, data, "--out", tmp_path / "rows.jsonl", *flags.split())
    )
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_the_checkpoint_is_refused(data, checkpoint, tmp_path, monkeypatch):
    make_folder(tmp_path / "others", vocab=vocabulary(tmp_path / "vocabulary", size=290))
    rope = save_untrained(tmp_path / "rope/checkpoint.pt", data, "rope")
    for words, reasons in (
        ((checkpoint, data.parent / "vocabulary"), "has no answers.json: .*fairseq-rpe prepare-questions"),
        ((tmp_path / "no.pt", data), "does not exist"),
        ((checkpoint, tmp_path / "others"), "was trained with another vocabulary than.*--vocab-from"),
        ((rope, data, "--rpe", "rope:scaling=dynamic_ntk,original_length=8"), "follows the length of the text"),
    ):
        said = refusal("eval-questions", *words, "--lengths", 90, "--out", tmp_path / "rows.jsonl")
        assert re.search(reasons, said), said
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    said = refusal("eval-questions", checkpoint, data, "--lengths", 90, "--out", tmp_path / "rows.jsonl")
    assert "needs rouge-score, which is not installed" in said and not (tmp_path / "rows.jsonl").exists()


def test_a_choice_that_is_longer_than_answers_needs_its_own_room(tmp_path):
    asked = Question("q", "Which one? ", ("no",), "", "", "", ("no", "it never does, " * 9))
    folder = make_sets(tmp_path / "data", [asked_set("long", {"valid": [asked]}, ("accuracy",), 6)])
    rows = folder.split("valid")
    [row] = rows
    read, choice = rows.lengths(row)[0], max(int(rows.sizes[item]) for item in row.choices)
    prompt.check_lengths(folder, "valid", [read + choice])  # answers of at most six tokens are written
    prompt.check_lengths(folder, "valid", [read + choice + 1], compare_choices=True)
    with pytest.raises(UserError, match=f"question 'q' of long takes {read} tokens .* where {read - 1} may be read"):
        prompt.check_lengths(folder, "valid", [read + choice], compare_choices=True)
