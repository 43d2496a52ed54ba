"""``answer``: questions by context length, against full passes and metrics computed here; stops and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TRAIN_FLAGS
from prepared_folder import asked_set, make_folder, make_sets, questions, vocabulary
from test_accuracy import error_of

from fairseq_rpe.cli.main import main
from fairseq_rpe.core import files
from fairseq_rpe.evaluation import questioning
from fairseq_rpe.evaluation.distances import bands
from fairseq_rpe.questions import prepared
from fairseq_rpe.questions.layout import fitted
from fairseq_rpe.questions.metrics import Scored, score
from fairseq_rpe.questions.question import Question

EOS, PAD = 2, 1
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


def answer(capsys, *argv: object) -> list[dict]:
    """The lines that ``answer`` prints."""
    capsys.readouterr()
    assert main(["answer", *(str(a) for a in argv), "--device", "cpu", "--json"]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def timeless(rows: list[dict]) -> list[dict]:
    return [{**row, "seconds": 0} for row in rows]


def read_by_model(data: Path, name: str, length: int, written: int = WRITTEN, cut: str = "end"):
    """Of each question of a set: its row, what is read of it, and how many tokens are left out."""
    rows = prepared.load(data).split("valid")
    found = []
    for row in rows:
        if row.set == name:
            parts = [rows.tokens(item) for item in (row.prompt, row.document, row.cue)]
            found.append((row, *fitted(*parts, length - written, cut)))
    return rows, found


@torch.no_grad()
def log_probs(model, row):
    scores = torch.log_softmax(model(torch.tensor([row]))[0][0], -1)
    scores[:, PAD] = -torch.inf
    return scores


def by_one_pass(model, read: list[int], first: int) -> list[int]:
    """The likeliest token behind each of what is read, from ``first`` on, by a full pass."""
    return log_probs(model, read)[first:].argmax(-1).tolist()


def test_answers_are_those_of_full_passes_and_scores_those_of_the_answers(
    data, checkpoint, model, tmp_path, capsys, monkeypatch
):
    written: dict[tuple[int, ...], list[int]] = {}
    real = questioning.greedy

    def spy(model, prompts, *rest):
        found = real(model, prompts, *rest)
        written.update({tuple(map(int, prompt)): tokens for prompt, tokens in zip(prompts, found, strict=True)})
        return found

    monkeypatch.setattr(questioning, "greedy", spy)
    out, texts = tmp_path / "rows.jsonl", tmp_path / "texts"
    flags = ["--lengths", "80,180", "--sets", "mill", "--out", out, "--predictions", texts]
    lines = answer(capsys, checkpoint, data, *flags)
    assert lines == files.read_json_lines(out) and [line["length"] for line in lines] == [80, 180]
    cut = []
    for line in lines:
        rows, asked = read_by_model(data, "mill", line["length"])
        given = json.loads(written_at(texts, f"mill-{line['length']}").read_text())
        assert list(given) == [row.id for row, _, _ in asked]  # in the order of the set
        for row, read, _ in asked:
            prompt, tokens = list(map(int, read)), written[tuple(map(int, read))]
            assert given[row.id] == rows.decode(tokens).strip()
            whole = [*tokens, EOS][: WRITTEN - 1]
            assert by_one_pass(model, prompt + whole[:-1], len(prompt) - 1) == whole
        assert len(set(given.values())) > 3
        items = [Scored(given[row.id], tuple(rows.text(a).strip() for a in row.answers)) for row, _, _ in asked]
        assert line["metrics"] == {name: score(name, items) for name in ("f1", "em", "rouge1", "rgm")}
        assert (line["published"], line["score"]) == ("f1", line["metrics"]["f1"])
        assert line["questions"] == len(asked) == 11
        cut.append((line["cut_documents"], line["lost_tokens"]))
        assert cut[-1] == (sum(lost > 0 for _, _, lost in asked), sum(lost for _, _, lost in asked))
        assert line["empty"] == sum(not text for text in given.values())
        assert (line["encoding"], line["suite"], line["subset"], line["transform"]) == (
            "fire",
            "own",
            "valid",
            "identity",
        )
        assert line["checkpoint"] == files.file_digest(checkpoint) and line["data"] == prepared.digest(data)
        assert "length_penalty" not in line and (line["by"], line["beam"], line["cut"]) == ("generation", 1, "end")
    assert 11 > cut[0][0] > cut[1][0] > 0

    # known results are not computed again, and keep their answers
    before = out.read_bytes()
    assert answer(capsys, checkpoint, data, *flags) == lines and out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "texts"]
    # others are added: another end of the document, a beam
    (start,) = answer(capsys, checkpoint, data, *flags[2:6], "--lengths", 80, "--cut", "start")
    (wide,) = answer(capsys, checkpoint, data, *flags[2:6], "--lengths", 80, "--beam", 2)
    assert start["lost_tokens"] == wide["lost_tokens"] == lines[0]["lost_tokens"]
    assert (start["cut"], wide["beam"], wide["length_penalty"]) == ("start", 2, 1.0)
    assert files.read_json_lines(out) == [*lines, start, wide]


def test_scores_by_the_distance_of_the_answer(checkpoint, tmp_path, capsys):
    """Of questions whose distances are on record: eight groups from near to far, whatever their order in the file."""
    order = [5, 18, 0, 11, 3, 16, 9, 1, 14, 7, 12, 4, 17, 2, 10, 15, 6, 13, 8]
    asked = [replace(one, distance=10 * place) for one, place in zip(questions(19), order, strict=True)]
    folder = make_folder(tmp_path / "data", {"train": questions(2, start=30), "valid": asked}, metrics=("rouge1",))
    texts = tmp_path / "texts"
    (line,) = answer(capsys, checkpoint, tmp_path / "data", "--lengths", 180, "--predictions", texts)
    given = json.loads(written_at(texts, "made-180").read_text())
    near = sorted(asked, key=lambda one: one.distance)
    groups = [near[0:2], near[2:4], near[4:7], near[7:9], near[9:11], near[11:14], near[14:16], near[16:19]]
    assert line["distances"] == [
        {
            "least": own[0].distance,
            "most": own[-1].distance,
            "questions": len(own),
            "score": score("rouge1", [Scored(given[one.id], one.answers) for one in own]),
        }
        for own in groups
    ]
    whole = sum(band["questions"] * band["score"] for band in line["distances"]) / 19
    assert whole == pytest.approx(line["score"])
    items = [Scored(text, ("Bren",)) for text in given.values()]
    assert folder.sets["made"].published == "rouge1" and len(bands("em", items, list(range(19)))) == 8
    # equal distances stand together
    alike = bands("em", items, [0] * 6 + [7] * 12 + [9])
    assert [(one.least, one.most, one.questions) for one in alike] == [(0, 0, 6), (7, 7, 12), (9, 9, 1)]
    assert bands("em", items, [None, *range(18)]) == bands("matthews", items, list(range(19))) == ()


def test_batches_change_nothing(data, checkpoint, tmp_path, capsys, monkeypatch):
    found = []
    for rows, pairs, tokens in ((3, 256**3, 1 << 15), (256, 60**2 * 2, 1 << 15), (256, 256**3, 200), (1, 1, 1)):
        monkeypatch.setattr(questioning, "_ROWS", rows)
        monkeypatch.setattr(questioning, "_PAIRS", pairs)
        monkeypatch.setattr(questioning, "_TOKENS", tokens)
        found.append(timeless(answer(capsys, checkpoint, data, "--lengths", "90")))
    assert all(one == found[0] for one in found) and [row["set"] for row in found[0]] == ["mill", "weather"]


@pytest.mark.parametrize(("by", "rows"), [("generation", 3), ("likelihood", 6)])  # two choices each
def test_a_stop_loses_a_batch_at_most(data, checkpoint, tmp_path, capsys, monkeypatch, by, rows):
    monkeypatch.setattr(questioning, "_ROWS", rows)
    flags = [checkpoint, data, "--lengths", "56,90", "--by", by, "--sets", "weather", "--predictions", tmp_path / "p"]
    whole = answer(capsys, *flags, "--out", tmp_path / "whole.jsonl")
    texts = written_at(tmp_path / "p", "weather-90").read_bytes()
    written_at(tmp_path / "p", "weather-90").unlink()
    out, real, asked = tmp_path / "rows.jsonl", questioning._answers, []

    def stopped(model, key, rows, info, batch, tick):
        asked.append((key.length, *batch.ids))
        if len(asked) == 5:  # of three batches the second of the second length
            raise KeyboardInterrupt
        return real(model, key, rows, info, batch, tick)

    monkeypatch.setattr(questioning, "_answers", stopped)
    capsys.readouterr()
    assert main(["answer", *map(str, flags), "--out", str(out), "--device", "cpu", "--json"]) == 130
    assert len(capsys.readouterr().out.splitlines()) == 1 == len(files.read_json_lines(out))
    (kept,) = tmp_path.glob("rows.jsonl.weather-90-*.partial")
    assert len(kept.read_bytes().splitlines()) == 1
    with open(kept, "ab") as file:  # a kill while a line was written
        file.write(b'{"answers": {"w1": "y')
    again = answer(capsys, *flags, "--out", out)
    assert timeless(again) == timeless(whole) and timeless(files.read_json_lines(out)) == timeless(whole)
    assert sorted(asked) == sorted([*asked[:4], *asked[5:], asked[5]]) and asked[4] == asked[5] and len(asked) == 7
    assert written_at(tmp_path / "p", "weather-90").read_bytes() == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "rows.jsonl", "whole.jsonl"]


def test_a_table_is_printed(data, checkpoint, capsys):
    argv = [checkpoint, data, "--lengths", "56", "--sets", "weather"]
    (row,) = answer(capsys, *argv)
    assert main(["answer", *map(str, argv), "--device", "cpu"]) == 0
    head, line = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert head == ["set", "length", "score %", "questions", "shortened", "seconds", "metrics %"]
    assert line[:4] == ["weather", "56", f"{row['score']:.2f}", str(row["questions"])]
    assert line[6] == ", ".join(f"{name} {value:.2f}" for name, value in row["metrics"].items())


def test_a_result_that_could_not_be_kept_is_not_forgotten(data, checkpoint, tmp_path, capsys, monkeypatch):
    """What was answered is still there when there is room for the result."""
    out, real = tmp_path / "rows.jsonl", files.append_json_line
    monkeypatch.setattr(files, "append_json_line", lambda *_: (_ for _ in ()).throw(OSError(28, "full", str(out))))
    argv = ["answer", str(checkpoint), str(data), "--lengths", "56", "--sets", "weather", "--out", str(out)]
    assert main([*argv, "--device", "cpu", "--json"]) == 2
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1 and "no space left" in said.err
    monkeypatch.setattr(files, "append_json_line", real)
    monkeypatch.setattr(questioning, "_answers", None)
    (row,) = answer(capsys, *argv[1:])
    assert timeless([row]) == timeless([json.loads(said.out)]) and [p.name for p in tmp_path.iterdir()] == [out.name]


def test_answers_of_different_questions_are_kept_apart(data, checkpoint, tmp_path, capsys):
    """One folder takes the answers of both splits, ways to answer and lengths, each in a file of its own."""
    for more in (["--lengths", "56"], ["--lengths", "90"], ["--lengths", "56", "--by", "likelihood"]):
        answer(capsys, checkpoint, data, "--sets", "weather", "--predictions", tmp_path, *more)
    assert sorted(p.name.split("-")[1] for p in tmp_path.iterdir()) == ["56", "56", "90"]


def test_the_likeliest_choice(data, checkpoint, model, tmp_path, capsys):
    """By sums over the tokens of a choice and its end, of full passes."""
    flags = ["--sets", "weather", "--lengths", 40, "--by", "likelihood", "--predictions", tmp_path]
    (line,) = answer(capsys, checkpoint, data, *flags)
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
        items.append(Scored(given[row.id], (rows.text(row.answers[0]).strip(),), "", ("no", "yes")))
    right = sum(item.prediction in item.answers for item in items)
    assert line["metrics"]["accuracy"] == 100 * right / 7 and line["by"] == "likelihood" and line["empty"] == 0
    assert line["undefined"] == (["matthews"] if len(set(given.values())) == 1 else [])


def test_other_positions_and_encodings(data, checkpoint, tmp_path, capsys):
    base = [checkpoint, data, "--sets", "weather"]
    one, two = answer(capsys, *base, "--lengths", "24,64", "--positions", "interpolate")
    assert (one["transform"], two["transform"]) == ("identity", "interpolate:ratio=0.5")
    assert two["positions"] == "interpolate"
    flags = ["--lengths", 40, "--positions", "randomized:max=64"]
    rows = [answer(capsys, *base, *flags)[0] for _ in range(2)]
    assert timeless(rows[:1]) == timeless(rows[1:]) and rows[0]["draws"] == 1
    (row,) = answer(capsys, *base, "--lengths", 40, "--rpe", "fire:exact=true", "--compute-dtype", "bf16")
    assert (row["rpe"], row["encoding"], row["compute_dtype"]) == ("fire:exact=true", "fire", "bf16")


def test_refusals_in_one_line(data, checkpoint, tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.jsonl"

    def refused(*argv: object, of: Path = data, at: Path = checkpoint) -> str:
        said = error_of(capsys, "answer", at, of, "--out", out, "--device", "cpu", *argv)
        assert not out.exists() and not list(tmp_path.glob("*.partial"))
        return said

    assert "has no answers.json: make such a folder with fairseq-rpe prepare-answers" in refused(
        "--lengths", 40, of=data.parent / "vocabulary"
    )
    assert "--sets mil: " in (said := refused("--lengths", 40, "--sets", "mil")) and "did you mean 'mill'" in said
    assert "names a set twice" in refused("--lengths", 40, "--sets", "mill,mill")
    assert "--subset test: mill has no answers there, but in train, valid" in refused(
        "--lengths", 40, "--subset", "test"
    )
    assert "--subset train: weather has no answers there" in refused("--lengths", 90, "--subset", "train")
    assert "16 tokens leave no room for a question: answers of mill take up to 16" in refused("--lengths", "90,16")
    said = refused("--lengths", "90,20", "--sets", "mill")
    assert "question 'q8' of mill takes " in said and " where 4 may be read: give a greater length" in said
    said = refused("--lengths", 90, "--by", "likelihood", "--sets", "mill")
    assert "question 'q9' of mill has no choices to compare: use --by generation" in said
    assert "--beam is of --by generation" in refused("--lengths", 90, "--by", "likelihood", "--beam", 2)
    assert "--length-penalty is of a beam" in refused("--lengths", 90, "--length-penalty", 1)
    penalty = ("--beam", 2, "--length-penalty", "1e308")
    assert "--length-penalty 1e+308 is out of range: use 0 to 10" in refused("--lengths", 90, *penalty)
    assert "does not exist" in refused("--lengths", 90, at=tmp_path / "no.pt")
    make_folder(tmp_path / "others", vocab=vocabulary(tmp_path / "vocabulary", size=290))
    said = refused("--lengths", 90, of=tmp_path / "others")
    assert "was trained with another vocabulary than" in said and "--vocab-from" in said
    rope = save_untrained(tmp_path / "rope/checkpoint.pt", data, "rope")
    said = refused("--lengths", 90, "--rpe", "rope:scaling=dynamic_ntk,original_length=8", at=rope)
    assert "follows the length of the text" in said
    assert "raise max to at least 90" in refused(
        "--lengths", "40,90", "--positions", "randomized:max=64", "--sets", "weather"
    )
    assert "--predictions" in refused("--lengths", 90, "--predictions", checkpoint)
    monkeypatch.setitem(__import__("sys").modules, "rouge_score", None)
    assert "needs rouge-score, which is not installed" in refused("--lengths", 90)


def test_a_known_result_without_its_answers_is_not_passed_over(data, checkpoint, tmp_path, capsys):
    flags = [checkpoint, data, "--lengths", 40, "--sets", "weather", "--out", tmp_path / "rows.jsonl"]
    answer(capsys, *flags)
    said = error_of(capsys, "answer", *flags, "--predictions", tmp_path / "p", "--device", "cpu")
    assert "has the result of weather at 40 tokens, and --predictions has not its answers" in said
