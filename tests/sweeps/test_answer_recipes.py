"""Recipes for answers: the papers' tables, what is trained and asked in which order, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import run_here, with_vocabulary
from prepared_folder import asked_set, make_folder, make_sets, questions
from refusal import refusal
from sweep_commands import LAUNCHERS, SMALL, dry_run, merged_record, parse, recipe_error, refused, resolve_sweep, table

from fairseq_rpe.core import UserError
from fairseq_rpe.questions import benchmarks, dataset
from fairseq_rpe.questions.dataset import Question
from fairseq_rpe.reports.kind_report import load_results
from fairseq_rpe.reports.question_scores import published_mean
from fairseq_rpe.runs.run_folder import FinishedTraining
from fairseq_rpe.sweeps import costs, recipes, run_sweep, slurm
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.sweep_record import EvaluationQuestions, QuestionConfig, SweepFolder
from fairseq_rpe.utils import files, json_files

RECIPES = [name for name in recipes.names() if recipes.load(name).kind == "answers"]
SCROLLS = ["qasper", "contract_nli", "qmsum", "narrative_qa", "summ_screen_fd", "gov_report", "quality"]
GLUE = ["boolq", "cb", "cola", "copa", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "wic", "wnli", "multirc", "record"]
GLUE += ["wsc"]
FINE_TUNED = {"updates": 25_000, "lr": 1e-5, "dropout": 0.1, "attention_dropout": 0.1}  # FIRE, Tables 10 and 12
STATED = {
    "fire-scrolls": {**FINE_TUNED, "tokens": 8192, "batch": 128},
    "fire-narrativeqa": {**FINE_TUNED, "tokens": 8192, "batch": 128},
    "fire-glue": {**FINE_TUNED, "tokens": 1024, "batch": 256},
}
FOLDERS = {"fire-scrolls": SCROLLS, "fire-narrativeqa": ["narrative_qa"], "fire-glue": ["glue-superglue"]}
LENGTHS = {"fire-scrolls": (8192,), "fire-glue": (1024,)}
LENGTHS |= {"fire-narrativeqa": (512, 2048, 4096, 8192, 16384, 24576, 32768)}
# FIRE reports the best result in validation
BEST = ["--eval-answers", "--best-checkpoint-metric", "answers", "--maximize-best-checkpoint-metric"]
METHODS = ["nope", "rope", "rope-pi", "alibi", "kerple_log", "t5_bias", "fire"]
GLUE_ABLATIONS = ["fire", "nope", "rope", "fire-no-log", "fire-no-threshold"]
NARRATIVE = [*METHODS[:2], "rope-pi-8192", "rope-pi-32768", *METHODS[3:]]


def by_method(methods: list[str], *means: float) -> dict[str, float]:
    return dict(zip(methods, means, strict=True))


MEANS = {  # as FIRE prints them: Tables 1, 11, 13 and 3
    "fire-scrolls": by_method(METHODS, 22.56, 20.38, 23.23, 15.06, 24.11, 24.14, 25.64),
    "fire-narrativeqa": by_method(NARRATIVE, 4.238, 2.174, 3.738, 5.589, 4.135, 8.338, 4.788, 8.705),
    "fire-glue": by_method(GLUE_ABLATIONS, 71.145, 67.742, 71.152, 69.06, 70.42),
    "fire-scrolls-large": by_method(METHODS, 24.34, 22.39, 26.04, 16.58, 25.72, 25.27, 27.05),
    "fire-glue-large": {"fire": 74.469, "rope": 75.243, "kerple_log": 74.739},
    "fire-scrolls-shared": {"fire": 24.83},
    "fire-glue-shared": {"fire": 71.04},
}


def family(name: str) -> str:
    """The recipe of the base model with an encoding for each layer."""
    return name.removesuffix("-large").removesuffix("-shared")


def methods_of(name: str) -> list[str]:
    if name.endswith("-shared"):
        return ["fire"]
    return NARRATIVE if name == "fire-narrativeqa" else METHODS


RECIPE = """
title = "t"
paper = "p"
kind = "answers"
[methods.rope]
rpe = "rope"
[methods.rope-stretched]
rpe = "rope"
rpe_eval = "rope:scaling=linear,factor=2"
[methods.rope-pi]
rpe = "rope:scaling=linear,factor=2"
continues = "rope"
[presets.laptop]
tokens = 32
updates = 3
batch_sentences = 4
lengths = [64, 96]
pretrained = "before"
methods = ["rope", "rope-stretched"]
tuning = { tokens = 64, updates = 2, batch_sentences = 2, lr = 1e-3, warmup = 1 }
questions = { made = { data = "made", prepare = ["prepare-questions", "qasper"] } }
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A prepared text, with a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    lines = [f"Day {n}. The river rose, and {n * 7 % 97} boats went to town." for n in range(400)]
    (folder / "text.txt").write_text("\n".join(lines))
    run_here("prepare", folder / "text.txt", "--out", folder / "bin", "--vocab-size", 300)
    return folder / "bin"


@pytest.fixture
def place(corpus: Path, tmp_path: Path, monkeypatch) -> Path:
    """A folder with a recipe, ``mine.toml``, and questions in its corpus' vocabulary, in which commands are started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(RECIPE)
    make_folder(tmp_path / "made", vocab=corpus, answer_tokens=24)
    return tmp_path


def test_there_are_three_and_further_models_of_two():
    assert sorted(set(map(family, RECIPES))) == sorted(STATED) and sorted(RECIPES) == sorted(MEANS)


@pytest.mark.parametrize(("name", "processes"), [*((name, 8) for name in RECIPES), ("fire-glue", 1)])
def test_the_paper_scale_is_the_papers(name, processes, tmp_path, monkeypatch):
    """Without data there: preparation, training on text as in fire-lm, fine-tuning and questions."""
    monkeypatch.chdir(tmp_path)
    lines = dry_run("--recipe", name, "--preset", "paper", "--nproc", processes)
    model = name.removeprefix(family(name))  # large or shared
    before = dry_run("--recipe", f"fire-lm{model}", "--preset", "paper", "--nproc", processes)
    folders, stated = FOLDERS[family(name)], STATED[family(name)]
    text, *made = [line for line in lines if line[0].startswith("prepare")]
    assert text == before[0]
    for folder, words in zip(folders, made, strict=True):
        sets = GLUE if folder == "glue-superglue" else [folder]
        data = ["--out", f"data-bin/{folder}-gpt2", "--vocab-from", "data-bin/c4-gpt2"]
        assert words == ["prepare-questions", *sets, *data]
        assert set(parse(words).names) <= set(benchmarks.benchmark_names())

    compared = methods_of(name)
    trained = [parse(line) for line in lines if line[0] == "train"]
    first, tuned = trained[: -len(compared) * len(folders)], trained[-len(compared) * len(folders) :]
    usual = {line[line.index("--rpe") + 1]: parse(line) for line in before if line[0] == "train"}
    encodings = ["nope", "rope", "alibi", "kerple_log", "t5_bias:buckets=64", "fire"]
    assert [one.rpe for one in first] == (["fire"] if model == "-shared" else encodings)
    for one in first:
        other, runs = vars(usual[one.rpe]), f"runs/fire-lm{model}-paper/"
        for key, value in vars(one).items():
            same = str(value).replace(f"runs/{name}-paper/", runs)
            assert same == str(other[key]), key
    for number, one in enumerate(tuned):
        method, folder = compared[number % len(compared)], folders[number // len(compared)]
        found = {**vars(one), "batch": one.batch_sentences * one.nproc}
        assert {key: found[key] for key in stated} == pytest.approx(stated)
        factor = {"rope-pi": 4, "rope-pi-8192": 4, "rope-pi-32768": 16}.get(method)
        begun = next(
            o for o in first if o.rpe == ("rope" if factor else recipes.load(name).select_methods((method,))[0].rpe)
        )
        assert one.rpe == (f"rope:scaling=linear,factor={factor}" if factor else begun.rpe)
        assert one.finetune_from == begun.out / "checkpoint_last.pt"
        assert str(one.data) == f"data-bin/{folder}-gpt2" and one.arch == ("large" if model == "-large" else "base")
        assert one.rpe_share == ("model" if model == "-shared" else None)
        mixed = ["--mixture", "proportional"] if family(name) == "fire-glue" else []
        assert one.extra == ["--rpe-train-length", "2048", *mixed, *BEST]

    answers = [parse(line) for line in lines if line[0] == "eval-questions"]
    assert len(answers) == len(tuned) and len(lines) == 1 + len(made) + len(trained) + len(answers)
    for one, model in zip(answers, tuned, strict=True):
        assert one.checkpoint == model.out / "checkpoint_best.pt" and one.data == model.data
        assert (one.lengths, one.split, one.answer_mode, one.beam) == (LENGTHS[family(name)], "valid", "generation", 1)
        assert list(one.sets) == (GLUE if family(name) == "fire-glue" else [one.data.name.removesuffix("-gpt2")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
def test_published_values_are_those_printed(name):
    printed = recipes.load(name).published
    for method, mean in MEANS[name].items():
        within = 0.006 if family(name) == "fire-scrolls" else 6e-4
        assert published_mean(printed, method) == pytest.approx(mean, abs=within)
    lengths = list(map(str, LENGTHS["fire-narrativeqa"]))
    keys = {"fire-scrolls": SCROLLS, "fire-narrativeqa": lengths, "fire-glue": GLUE}[family(name)]
    full = {method: list(row) for method, row in printed.values.items() if "mean" not in row}
    assert all(row == keys for row in full.values())
    # of FIRE-S the mean of GLUE and SuperGLUE alone is printed
    assert list(full) == ([] if name == "fire-glue-shared" else methods_of(name)) and printed.measure == "score"


def test_some_published_values():
    published = {name: recipes.load(name).published for name in RECIPES}
    for name, method, printed in (
        ("fire-scrolls", "fire", [16.24, 82.93, 14.58, 9.55, 15.87, 16.31, 24.02]),
        ("fire-scrolls", "alibi", [8.38, 67.21, 5.48, 4.24, 3.49, 6.96, 9.68]),
        ("fire-scrolls-large", "fire", [19.47, 85.15, 15.10, 10.27, 17.27, 16.83, 25.26]),
        ("fire-scrolls-shared", "fire", [17.93, 75.22, 15.05, 9.22, 16.02, 16.25, 24.11]),
        ("fire-glue-large", "t5_bias", {"cb": 87.50, "record": 52.54, "wsc": 69.23}),
        ("fire-narrativeqa", "fire", [6.232, 8.076, 8.178, 9.581, 9.581, 9.868, 9.417]),
        ("fire-narrativeqa", "rope", {"8192": 8.737, "32768": 0.132}),
        ("fire-glue", "alibi", {"boolq": 69.76, "multirc": 12.70, "wsc": 63.46}),
    ):
        row = published[name].values[method]
        assert {**row, **printed} == row if isinstance(printed, dict) else list(row.values()) == printed
    scrolls = published["fire-scrolls"]
    assert published_mean(scrolls, "fire", ["qasper", "quality"]) == pytest.approx(20.13)
    assert published_mean(scrolls, "fire", ["qasper", "other"]) is None
    assert published_mean(published["fire-glue"], "fire-no-log", ["cb"]) is None


@pytest.mark.parametrize("name", RECIPES)
def test_the_laptop_scale_begins_with_fire_lms_models(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = dry_run("--recipe", name)
    made = [parse(line) for line in lines if line[0] in ("prepare-cloze", "prepare-questions")]
    assert made and {str(one.vocab_from) for one in made} == {"data-bin/stdlib"}
    trained = [parse(line) for line in lines if line[0] == "train"]
    shared = "-shared" if name.endswith("-shared") else ""
    assert [one.tokens for one in trained if one.finetune_from is None] == [64] * (1 if shared else 6)
    assert {one.tokens for one in trained if one.finetune_from} == {512 if family(name) == "fire-glue" else 256}
    scale = recipes.load(name).preset("laptop")
    assert scale.pretrained == f"runs/fire-lm{shared}-laptop" and scale.data == "data-bin/stdlib"


def test_methods_that_begin_alike_share_the_training(place, corpus):
    lines = dry_run(corpus, "--recipe", "mine.toml", "--methods", "all", "--out", "x", *SMALL)
    lines = lines[1:]  # how the questions are made
    assert [line[0] for line in lines] == [
        "train",
        "train",
        "eval-questions",
        "eval-questions",
        "train",
        "eval-questions",
    ]
    first, tuned, pi = (parse(line) for line in lines if line[0] == "train")
    assert tuned.finetune_from == pi.finetune_from == first.out / "checkpoint_last.pt"
    assert (tuned.tokens, tuned.updates, tuned.batch_sentences, tuned.lr, str(tuned.data)) == (64, 2, 2, 1e-3, "made")
    assert tuned.extra == [*SMALL[1:], "--rpe-train-length", "32"] and first.extra == SMALL[1:]
    plain, stretched, _ = (parse(line) for line in lines if line[0] == "eval-questions")
    assert plain.checkpoint == stretched.checkpoint and plain.lengths == (64, 96)
    assert (plain.rpe, stretched.rpe) == (None, "rope:scaling=linear,factor=2")
    # a stretched method alone trains what it begins with
    alone = dry_run(corpus, "--recipe", "mine.toml", "--methods", "rope-pi", "--out", "x")
    assert [line[0] for line in alone[1:]] == ["train", "train", "eval-questions"] and "--finetune-from" not in alone[1]


def test_other_folders_of_questions_and_a_divided_batch(place, corpus):
    shutil.copytree("made", "other")
    given = [corpus, "--recipe", "mine.toml", "--out", "x", "--methods", "rope"]
    lines = dry_run(*given, "--eval-data", "more=other", "--nproc", "2", "--lengths", "80")
    assert [line[0] for line in lines] == ["train", "train", "eval-questions"] and lines[1][1] == "other"
    assert parse(lines[1]).batch_sentences == 1
    assert parse(lines[2]).lengths == (80,)
    both = dry_run(*given, "--eval-data", "more=other", "--eval-data", "made=made")
    assert [line[1] for line in both if line[0] == "train"] == [str(corpus), "other", "made"]
    assert "cannot be divided" in refused(*given, "--nproc", "4")


def finished(cell: SweepRun, text: bytes = b"weights", updates: int | None = None) -> None:
    """Leave behind what a finished training leaves."""
    cell.folder.checkpoints.path.mkdir(parents=True)
    cell.folder.checkpoints.last.write_bytes(text)
    digest = files.sha256_of_files(cell.folder.checkpoints.last)
    cell.folder.checkpoints.write_record(cell.config, cell.plan, FinishedTraining(updates or cell.plan.updates, digest))


def test_finished_runs_of_another_sweep_are_taken(place, corpus, capsys):
    given = [corpus, "--recipe", "mine.toml", "--methods", "rope", "--out"]
    _, [there, _] = resolve_sweep(*given, "before")
    _, [own, tuned] = resolve_sweep(*given, "x")
    assert own.folder.path == Path("x/runs/rope-seed1") and tuned.parent is own
    finished(there)
    _, [taken, tuned] = resolve_sweep(*given, "x")
    assert taken.folder.path == Path("before/runs/rope-seed1") and tuned.parent is taken
    assert taken.remaining_stages() == [] and [stage.name for stage in tuned.remaining_stages()] == [
        "training",
        "evaluating",
    ]
    assert tuned.config.finetune_from == taken.folder.checkpoints.last
    # one that this sweep has begun stays
    finished(own, b"others")
    assert resolve_sweep(*given, "x")[1][0].folder.path == own.folder.path
    shutil.rmtree("x")
    # another training is not taken, which is said
    capsys.readouterr()
    _, [anew, _] = resolve_sweep(*given, "x", "--lr", "0.1")
    assert anew.folder.path == own.folder.path
    assert "before/runs/rope-seed1/checkpoints is not used: lr is " in capsys.readouterr().err
    shutil.rmtree("before")
    finished(there, updates=1)
    assert resolve_sweep(*given, "x")[1][0].folder.path == own.folder.path
    assert "its training is not finished" in capsys.readouterr().err


def test_jobs_and_progress_know_what_a_fine_tuning_waits_for(place, corpus):
    sweep, made = resolve_sweep(corpus, "--recipe", "mine.toml", "--methods", "rope", "--out", "x")
    lines = run_sweep.dry_run_lines(sweep, made, [("partition", "gpu")])
    assert any("one of 1 that wait" in line for line in lines) and slurm.job_settings(sweep, [])["name"] == "x"
    assert [costs.RunCost.from_run(cell).total > 0 for cell in made] == [True, True]


def test_a_sweep_over_questions_is_carried_out_once(place, corpus, undrawn):
    """Two trainings and two evaluations, of models that are as small as can be."""
    given = ["sweep", corpus, "--recipe", "mine.toml", "--out", "x", "--jobs", "1", "--device", "cpu", *SMALL]
    said = run_here(*given).stdout
    assert "| rope " in said and "| rope-stretched " in said and "scores.csv" in said
    run = next(path for path in Path("x/runs").iterdir() if path.name.startswith("made-"))
    record = json_files.read_json(run / "checkpoints/run.json")
    assert record["settings"]["tokens"] == 64 and record["finished"]["updates"] == 2
    assert record["settings"]["data"] == dataset.dataset_digest(Path("made"))
    found = [(row["rpe"], row["length"]) for row in json_files.read_json_lines(run / "eval.jsonl")]
    assert found == [(rpe, n) for rpe in (None, "rope:scaling=linear,factor=2") for n in (64, 96)]
    (answers,) = (run / "answers/rope").glob("made-96-*.json")
    assert len(json.loads(answers.read_text())) == 4
    rows = [(row["method"], row["length"], row["metric"]) for row in table(Path("x/scores.csv"))]
    methods, lengths, metrics = ("rope", "rope-stretched"), ("64", "96"), ("f1", "em")
    assert rows == list(itertools.product(methods, lengths, metrics))
    page = Path("x/report.html").read_text()
    assert all(name in page for name in ("rope-seed1, on text", "made-rope-", "pre-training", "--finetune-from"))
    left = sorted(path for path in Path("x/runs").rglob("*") if path.suffix in (".pt", ".jsonl", ".log"))
    times = [path.stat().st_mtime_ns for path in left]
    assert run_here(*given).stdout == said
    assert [path.stat().st_mtime_ns for path in left] == times
    # another fine-tuning, other questions, another way to ask: another sweep
    for old, new in (
        ("updates = 2", "updates = 9"),
        ("lengths = [64, 96]", 'question_config = { truncate = "start" }'),
    ):
        (place / "mine.toml").write_text(RECIPE.replace(old, new))
        assert "choose another" in refusal(*given)
    (place / "mine.toml").write_text(RECIPE)
    shutil.rmtree("made")
    make_folder(place / "made", {"train": questions(5), "valid": questions(3, start=5)}, corpus, answer_tokens=24)
    assert "choose another" in refusal(*given)


def test_the_best_checkpoint_is_asked_where_that_is_said(place, corpus, undrawn):
    """Its answers alone are reported, and a file that is not the training's is refused."""
    best = RECIPE.replace("updates = 2,", "updates = 4,") + 'question_config = { checkpoint = "best", beam = 2 }\n'
    (place / "mine.toml").write_text(best)
    given = [corpus, "--recipe", "mine.toml", "--methods", "rope", "--lengths", "64", "--out", "x"]
    said = run_here("sweep", *given, "--jobs", 1, "--device", "cpu", *SMALL).stdout
    sweep, (_, tuned) = resolve_sweep(*given, *SMALL)
    folder = tuned.folder.checkpoints
    record = folder.read_record()
    assert record.finished.best == files.sha256_of_files(folder.best) == folder.checkpoint_digest("best")
    (row,) = json_files.read_json_lines(tuned.folder.results)
    assert row["checkpoint"] == record.finished.best and row["beam"] == 2 and tuned.remaining_stages() == []
    assert "checkpoint that was best in validation" in Path("x/report.html").read_text() and "| rope " in said
    scores = re.findall(r'"valid_answers": "([\d.]+)"', tuned.folder.train_log.read_text())
    assert torch.load(folder.best)["extra_state"]["best"] == pytest.approx(max(map(float, scores)), abs=1e-2)

    # another file in its place: of its digest nothing was asked
    other = FinishedTraining(record.finished.updates, record.finished.checkpoint, "another")
    folder.write_record(tuned.config, tuned.plan, other)
    with pytest.raises(UserError, match="checkpoint_best.pt was changed after its training: delete"):
        tuned.remaining_stages()
    with pytest.raises(UserError, match="holds no finished evaluation"):
        load_results(SweepFolder(sweep.out), SweepFolder(sweep.out).read_record())


def test_the_best_checkpoint_of_sets_without_a_mean_is_refused(place, corpus):
    (place / "mine.toml").write_text(RECIPE + 'question_config = { checkpoint = "best" }\n')
    shutil.rmtree("made")
    known_choices = [replace(one, answers=("yes",), choices=("yes", "no")) for one in questions(8)]
    splits = {"train": known_choices[:5], "valid": known_choices[5:]}
    make_sets(place / "made", [asked_set("of-classes", splits, ("matthews",), 8)], corpus)
    said = refused(corpus, "--recipe", "mine.toml", "--out", "x")
    assert "no set of made is scored by a mean over questions" in said and not Path("x").exists()


def test_folders_that_cannot_be_asked(place, corpus, tmp_path_factory):
    given = [corpus, "--recipe", "mine.toml", "--out", "x"]
    how = f"fairseq-rpe prepare-questions qasper --out made --vocab-from {corpus}"
    Path("made").rename("elsewhere")
    assert f"data folder made does not exist: make it with {how}" in refused(*given)
    assert dry_run(*given)[0] == shlex.split(how)[1:]
    assert "make it with fairseq-rpe prepare-questions NAME --out no" in refused(*given, "--eval-data", "q=no")
    assert f"{corpus} holds no questions" in refused(*given, "--eval-data", f"q={corpus}")
    Path("elsewhere").rename("made")
    more = with_vocabulary(corpus, tmp_path_factory.mktemp("data"), 9_000)
    other = f"made has another vocabulary than {more}: prepare another folder, e.g. {how[: -len(str(corpus))]}"
    assert other in refused(more, *given[1:])
    make_sets(place / "two", [asked_set("a", {"train": questions(4), "valid": questions(2, 4)})], corpus)
    (place / "two.toml").write_text(RECIPE.replace('data = "made"', 'data = "two", sets = ["b"]'))
    for flags, words in (
        ("--lengths 20", "leave no room for a question: answers of made"),
        ("--split test", "--split test: made has no answers in this split"),
        ("--recipe two.toml", "--sets b: two has a"),
        ("--max-tokens 9", "drop --max-tokens"),
        ("--algorithms copy", "compares on text: drop --algorithms"),
    ):
        assert words in refused(*given, *flags.split())
    # questions are not taken for a text
    text = ["--encodings", "rope", "--tokens", "32", "--lengths", "64", "--split", "valid", "--out", "x"]
    said = refused("made", *text)
    assert "made holds questions" in said and "--eval-data NAME=made" in said
    assert "made holds questions" in refused(corpus, *text, "--eval-data", "more=made")
    assert "made holds questions" in refused("made", *given[1:])
    assert not Path("x").exists()


def long_ones(start: int, number: int) -> list[Question]:
    """Questions that read more than 70 tokens beside their documents, of which there are none."""
    text = "The river rose, and boats went to town. " * 12 + "How many? "
    return [Question(f"long{i}", text, (str(i),), choices=(str(i), "0")) for i in range(start, start + number)]


@pytest.mark.parametrize(
    ("splits", "old", "new", "words"),
    [
        ({"train": [*questions(4), *long_ones(9, 1)]}, "", "", "question 'long9' of b takes "),
        ({"valid": [*questions(2, 4), *long_ones(9, 1)]}, "", "", "question 'long9' of b takes "),
        ({"valid": long_ones(9, 2)}, "64, updates", "640, updates", "question 'long9' of b takes "),
        ({}, 'data = "made"', 'data = "made", sets = ["b"]', None),
        (
            {},
            "methods = [",
            'question_config = { answer_mode = "likelihood" }\nmethods = [',
            "question 'q6' of b has no choices",
        ),
        ({}, "warmup = 1 }", 'warmup = 1, mixture = "capped:none" }', "--mixture capped:none is not one of"),
        (
            {},
            "warmup = 1 }",
            'warmup = 1, mixture = "a=1,c=1" }',
            "--mixture names 'c', which is not a set of this folder",
        ),
    ],
)
def test_questions_that_do_not_fit_are_found_before_anything_is_trained(place, corpus, splits, old, new, words):
    a = {"train": [q for q in questions(6) if q.choices], "valid": [questions(3)[1]]}
    b = {"train": questions(4), "valid": questions(3, 5), **splits}
    shutil.rmtree("made")
    make_sets(place / "made", [asked_set("a", a, answer_tokens=24), asked_set("b", b, answer_tokens=24)], corpus)
    (place / "mine.toml").write_text(RECIPE.replace(old, new))
    given = [corpus, "--recipe", "mine.toml", "--methods", "rope", "--out", "x"]
    if words is None:
        assert dry_run(*given)
        return
    for launcher in LAUNCHERS:
        said = refused(*given, *launcher)
        assert words in said and ("takes" not in words or "give a greater length" in said)
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('kind = "answers"', 'kind = "text"'), "pretrained of preset 'laptop' is for kind answers"),
        (("questions = {", "other = {"), "unknown key 'other'"),
        (("questions = { made", "# { made"), "preset 'laptop' lacks questions"),
        (("tuning = { tokens = 64", 'tuning = { tokens = "64"'), "tokens of tuning of preset 'laptop' must be a whole"),
        (("tuning = { tokens", "tuning = { steps = 3, tokens"), "unknown key 'steps'"),
        (('questions = { made = { data = "made"', 'questions = { made = { dta = "made"'), "unknown key 'dta'"),
        (
            ("tokens = 32", 'question_config = { answer_mode = "guess" }\ntokens = 32'),
            "generation or likelihood, not 'guess'",
        ),
        (('"qasper"]', '"qaspre"]'), "of an unknown set 'qaspre' (did you mean 'qasper'?)"),
        (
            ('"prepare-questions"', '"prepare-question"'),
            "prepared by 'prepare-question' (did you mean 'prepare-questions'?)",
        ),
    ],
)
def test_malformed_recipes_are_refused(change, words, tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE.replace(*change))
    assert words in recipe_error(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('rpe = "rope:scaling=linear,factor=2"\ncontinues', 'rpe = "fire"\ncontinues', "'fire' has other parameters"),
        ('rpe_eval = "rope:scaling=linear,factor=2"', 'rpe_eval = "fire"', "'fire' has other parameters than 'rope'"),
        ("updates = 2,", "updates = 1,", "raise --updates to at least 2"),
    ],
)
def test_methods_that_do_not_fit_are_refused_before_training(place, corpus, old, new, words):
    (place / "mine.toml").write_text(RECIPE.replace(old, new))
    for launcher in LAUNCHERS:
        said = refused(corpus, "--recipe", "mine.toml", "--methods", "all", "--out", "x", *launcher)
        assert words in said and "method 'rope" in said and not Path("x/runs").exists()


def test_folders_that_are_not_there_are_refused_in_a_dry_run_without_the_text_too(place):
    """The recipe says how the text is made, and of the questions nothing."""
    recipe = RECIPE.replace('data = "made", prepare = ["prepare-questions", "qasper"]', 'data = "nowhere"')
    text = 'data = "text"\ncorpus = "wikitext103"\ntokens = 32'
    (place / "mine.toml").write_text(recipe.replace("tokens = 32", text))
    given = ["--recipe", "mine.toml", "--out", "x", "--launcher", "dry-run"]
    assert "nowhere does not exist" in refused(*given)
    (place / "mine.toml").write_text('base = "fire-lm"\n[presets.paper.evaluate]\nown = "nowhere"\n')
    assert "nowhere does not exist" in refused(*given, "--preset", "paper")


def test_a_sweep_on_record_is_taken_up_again_and_not_by_one_of_another_kind(place, corpus):
    """A method that continues another, and says nothing of how, is the same in the record."""
    given, folder = [corpus, "--recipe", "mine.toml", "--methods", "all", "--out", "x"], SweepFolder(Path("x"))
    state = merged_record(*given)
    folder.write_record(state)
    assert state.methods["rope-pi"].continues == "rope" and merged_record(*given) == state
    text = [corpus, "--encodings", "rope", "--tokens", "32", "--updates", "3", "--batch-sentences", "4"]
    said = refused(*text, "--lengths", "64", "--out", "x", "--split", "valid")
    assert "holds a sweep of another kind" in said
    assert folder.read_record() == state and state.kind == "answers" and state.tasks == ("made",)
    assert state.questions == {"made": EvaluationQuestions("made", dataset.dataset_digest(Path("made")), ("made",))}
    assert (state.settings.tokens, state.fine_tuning.tokens, state.fine_tuning.updates, state.question_config) == (
        32,
        64,
        2,
        QuestionConfig(),
    )
