"""Sweeps that evaluate on several texts, and methods that continue the training of others."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PROGRAM, checkpoint_with, run_here, with_vocabulary
from live_processes import begin, processes_about, wait_for
from refusal import refusal
from sweep_commands import (
    DRY,
    LAUNCHERS,
    QUIET,
    dry_run,
    flag,
    merged_record,
    parse,
    recipe_error,
    refused,
    resolve_sweep,
    table,
)

from fairseq_rpe.cli import sweep as sweep_command
from fairseq_rpe.core import UserError
from fairseq_rpe.reports import report_files
from fairseq_rpe.sweeps import local_executor, run_sweep, slurm
from fairseq_rpe.sweeps.sweep_record import Method, OptimizationSettings, SweepFolder
from fairseq_rpe.utils import files, json_files

RECIPE = """
title = "t"
paper = "p"
kind = "text"
[methods.yarn]
rpe = "rope:scaling=yarn,factor=2,original_length=$tokens"
continues = "rope"
[methods.rope]
rpe = "rope"
[presets.laptop]
tokens = 32
updates = 4
batch_sentences = 4
lengths = [64]
[presets.laptop.further.yarn]
tokens = 64
updates = 3
batch_sentences = 2
lr = 1e-3
warmup = 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def other(corpus: Path, tmp_path_factory) -> Path:
    """Another text with the same dictionary: the test split is the corpus's valid split."""
    folder = tmp_path_factory.mktemp("other") / "bin"
    folder.mkdir()
    shutil.copy(corpus / "dict.txt", folder)
    for end in ("bin", "idx"):
        shutil.copy(corpus / f"valid.{end}", folder / f"test.{end}")
    return folder


# what is printed


def test_a_dry_run_trains_in_order_and_evaluates_on_each_text(recipe, corpus, other, tmp_path):
    given = [corpus, "--recipe", recipe, "--eval-data", f"more={other}", "--out", tmp_path / "x"]
    lines = dry_run(*given, "--nproc", "1")
    assert [line[0] for line in lines] == ["train", "eval", "eval"] * 2
    first, further = (parse(line) for line in (lines[0], lines[3]))
    assert (first.rpe, first.tokens, first.updates, first.finetune_from) == ("rope", 32, 4, None)
    assert further.rpe == "rope:scaling=yarn,factor=2,original_length=32"
    assert (further.tokens, further.updates, further.batch_sentences, further.lr) == (64, 3, 2, 1e-3)
    assert further.finetune_from == first.out / "checkpoint_last.pt" != further.out / "checkpoint_last.pt"
    evaluated = [line for line in lines if line[0] == "eval"]
    assert [line[2] for line in evaluated] == [str(corpus), str(other)] * 2
    assert all("32,64" in line for line in evaluated)
    # the one that is continued is trained even where it is not compared
    alone = dry_run(*given, "--methods", "yarn")
    assert [line[0] for line in alone] == ["train", "train", "eval", "eval"] and alone[0] == lines[0]
    # the batch of each is divided
    two = dry_run(*given, "--nproc", "2")
    assert [flag(line, "--batch-sentences") for line in two if line[0] == "train"] == ["2", "1"]
    assert "the recipe's 2 sequences per update cannot be divided among 4" in refused(*given, "--nproc", "4")


def test_specs_are_completed_with_the_rotation_of_the_training_before(recipe, corpus, tmp_path):
    """Of the method that is continued, and of the method's own where another encoding evaluates it."""
    text = RECIPE.replace('rpe = "rope"', 'rpe = "rope:base=500"\nrpe_eval = "longrope:factors=2"')
    recipe.write_text(text)
    given = [corpus, "--recipe", recipe, "--out", tmp_path / "x"]
    lines = dry_run(*given)
    trained = [parse(line).rpe for line in lines if line[0] == "train"]
    assert trained == ["rope:base=500", "rope:scaling=yarn,factor=2,original_length=32,base=500"]
    evaluated = [parse(line).rpe for line in lines if line[0] == "eval"]
    assert evaluated == ["longrope:factors=2,base=500", None]
    recipe.write_text(text.replace("longrope:factors=2", "longrope:factors=2,base=10000"))
    assert "give base=500, or leave it out" in refused(*given)


def test_the_preparation_of_each_text_takes_the_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text('base = "fire-lm"\n[presets.paper.evaluate]\narxiv = "data-bin/arxiv-gpt2"\n')
    lines = dry_run("--recipe", path, "--preset", "paper", "--eval-data", "github=data-bin/g")
    folders = ["data-bin/c4-gpt2", "data-bin/arxiv-gpt2", "data-bin/g"]
    first, *others = lines[:3]
    assert first[:4] == ["prepare-corpus", "c4", "--out", folders[0]]
    for words, name, place in zip(others, ("arxiv", "github"), folders[1:], strict=True):
        assert words == ["prepare-corpus", name, "--out", place, "--vocab-from", folders[0]]
        parse(words)
    assert [line[2] for line in lines if line[0] == "eval"][:3] == folders


def test_a_folder_of_the_recipe_is_made_by_its_command_however_its_path_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data-bin/arxiv-gpt2").mkdir(parents=True)
    path = tmp_path / "mine.toml"
    path.write_text('base = "fire-lm"\n[presets.paper.evaluate]\narxiv = "data-bin/./arxiv-gpt2/"\n')
    words = ["sweep", "--recipe", str(path), "--preset", "paper"]
    assert sweep_command.resolve_sweep(parse(words)).prepared == {"arxiv"}
    assert sweep_command.resolve_sweep(parse([*words, "--eval-data", "arxiv=."])).prepared == set()


def test_slurm_is_told_what_waits_for_what(recipe, corpus, tmp_path, monkeypatch):
    sweep, made = resolve_sweep(corpus, "--recipe", recipe, "--out", tmp_path / "x")
    lines = [line for line in run_sweep.dry_run_lines(sweep, made, [("partition", "gpu")]) if line.startswith("#")]
    assert lines[0].startswith("# an array of 1 SLURM jobs: ") and "one of 1 that wait" in lines[1]
    assert lines[2] == "# job rope-seed1:" and lines[3].endswith(", after rope-seed1:")
    submitted: list[tuple[list[tuple[str, str]], list[str]]] = []

    def executor(_sweep, settings):
        def map_array(_job, runs):
            submitted.append((list(settings), [cell.name for cell in runs]))
            ended = SimpleNamespace(done=lambda: True, exception=lambda: None)
            return [SimpleNamespace(job_id=f"{7 + len(submitted)}_{n}", **vars(ended)) for n in range(len(runs))]

        return SimpleNamespace(map_array=map_array)

    monkeypatch.setattr(slurm, "make_executor", executor)
    assert slurm._submit(sweep, [("partition", "gpu")], made) == ""
    (first, runs), (behind, waiting) = submitted
    assert first == [("partition", "gpu")] and behind == [*first, ("dependency", "afterany:8_0")]
    assert [*runs, *waiting] == [cell.name for cell in made]


# what is refused


def test_texts_that_cannot_be_evaluated_on(recipe, corpus, other, tmp_path):
    more = with_vocabulary(corpus, tmp_path, 9_000)
    how = f"fairseq-rpe prepare SOURCE --out {more} --vocab-from {corpus}"
    for texts, words in (
        ([f"a={more}"], f"{more} has another vocabulary than {corpus}: prepare another folder, e.g. {how}"),
        ([f"arxiv={tmp_path}/no"], f"make it with fairseq-rpe prepare-corpus arxiv --out {tmp_path}/no"),
        ([f"a={corpus}"], "holds the same text as the one that is trained on"),
        ([f"a={other}", f"b={other}"], f"--eval-data b: {other} holds the same text as a"),
        ([f"a={other}", f"a={corpus}"], "gives one name twice"),
        ([f"a/b={other}"], "named with letters, digits"),
        ([f"a={tmp_path}"], "is not a binarised data folder"),
    ):
        given = [word for text in texts for word in ("--eval-data", text)]
        assert words in refused(corpus, "--recipe", recipe, "--out", tmp_path / "x", *given)
    task = ["--algorithms", "copy", "--encodings", "nope", "--out", tmp_path / "x"]
    assert "--eval-data is for text" in refused(*task, "--eval-data", f"a={other}")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('continues = "rope"', 'continues = "roppe"', "an unknown method 'roppe' (did you mean 'rope'?)"),
        ('continues = "rope"', 'continues = "yarn"', "continues 'yarn', which continues another one"),
        ("further.yarn", "further.rope", "further of preset 'laptop' names 'rope', which continues no method"),
        ("updates = 3", "arch = 3", "unknown key 'arch'"),
        ('[methods.rope]\nrpe = "rope"', '[methods.rope]\nrpe = "rope"\nfurther = {updates = 3}', "of nothing"),
    ],
)
def test_methods_that_continue_nothing(old, new, words, recipe):
    recipe.write_text(RECIPE.replace(old, new))
    assert words in recipe_error(recipe)


OTHER_PARAMETERS = "other parameters than 'rope', which the model was trained with"
YARN = "rope:scaling=yarn,factor=2,original_length=$tokens"
ALONE = RECIPE.partition("[presets.laptop.further.yarn]")[0].replace(YARN, "rope")  # a method that continues none
UNREAD = 'rpe_eval = "nope"\npositions_eval = "interpolate"'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RECIPE.replace(YARN, "fire"), OTHER_PARAMETERS),
        (RECIPE.replace(YARN, "roep"), "unknown encoding 'roep' (did you mean 'rope'?)"),
        (RECIPE.replace(YARN, "longrope:factors=1+2"), "factors"),
        (ALONE.replace('continues = "rope"', 'rpe_eval = "fire"'), OTHER_PARAMETERS),
        (ALONE.replace('continues = "rope"', 'rpe_eval = "roep"'), "unknown encoding 'roep'"),
        (ALONE.replace('continues = "rope"', 'rpe_eval = "rerope:base=500"'), "'rerope:base=500' has base=500"),
        (ALONE.replace('continues = "rope"', UNREAD), "'nope' reads no positions"),
    ],
)
def test_a_method_that_cannot_continue_or_be_evaluated_is_refused_before_training(
    text, words, recipe, corpus, tmp_path
):
    recipe.write_text(text)
    for launcher in LAUNCHERS:
        said = refused(corpus, "--recipe", recipe, "--out", tmp_path / "x", *launcher)
        assert "method 'yarn': " in said and words in said and not (tmp_path / "x/runs").exists()


def test_trainings_that_cannot_follow_the_first(recipe, corpus, tmp_path):
    """Its table has another length, its updates are all warm-up, or the backend does not serve the evaluation."""

    def said(text: str, *more: str) -> str:
        recipe.write_text(text)
        return refused(corpus, "--recipe", recipe, "--out", tmp_path / "x", *DRY, *more)

    tables = RECIPE.replace(YARN, "learned").replace('[methods.rope]\nrpe = "rope"', '[methods.rope]\nrpe = "learned"')
    message = said(tables)
    assert "'learned' has other parameters than 'learned'" in message and "size mismatch" in message
    message = said(RECIPE.replace("warmup = 1", "warmup = 3"))
    assert "further training of method 'yarn': a warm-up of 3 is not below the 3 updates" in message
    content = ALONE.replace('continues = "rope"', 'rpe_eval = "cope"').replace('rpe = "rope"', 'rpe = "nope"', 1)
    assert "backend 'triton' never holds" in said(content, "--attention-backend", "triton")


def test_encodings_that_cannot_train_here_are_refused_before_training(corpus, tmp_path):
    given = [corpus, "--lengths", "64", "--tokens", "32", "--out", tmp_path / "x", "--encodings"]
    for words, more in (
        ("unknown encoding 'alibbi'", ["alibbi rope"]),
        ("can only be shared by: model", ["rope", "--rpe-share", "layer"]),
        ("'nope' reads no positions", ["nope", "--positions-train", "randomized:max_position=99"]),
    ):
        assert all(words in refused(*given, *more, *launcher) for launcher in LAUNCHERS)
    flex = [*given, "alibi", "--attention-backend", "flex"]
    said = refused(*flex)
    assert "--attention-backend flex" in said and "use 'sdpa'" in said and not (tmp_path / "x/runs").exists()
    assert dry_run(*flex)  # a machine that only prints commands need not be the one that trains


def test_a_checkpoint_to_begin_with(state, corpus, tmp_path):
    """One that is not there is refused; what the spec of the further training leaves open is the checkpoint's."""
    given = ["train", corpus, "--out", tmp_path / "x", "--device", "cpu", "--tokens", "32", "--rpe"]
    missing = tmp_path / "no.pt"
    for more in (["--finetune-from", missing], ["--init-from", missing, "--dry-run"]):
        assert f"checkpoint {missing} does not exist" in refusal(*given, "rope", *more)
    twice = ["--finetune-from", "no.pt", "--", "--finetune-from-model", "a.pt"]
    assert "give --finetune-from before the -- instead" in refusal(*given, "rope", *twice)
    from_rope = ["--init-from", checkpoint_with(state, tmp_path, "rope:base=500,rotary_fraction=0.5"), "--dry-run"]
    words = shlex.split(run_here(*given, "rope:scaling=linear,factor=2", *from_rope).stdout)
    assert flag(words, "--rpe") == "rope:scaling=linear,factor=2,base=500,rotary_fraction=0.5"
    assert "give base=500, or leave it out" in refusal(*given, "longrope:factors=2,base=10000", *from_rope)
    assert run_here(*given, "alibi", *from_rope).stdout


# what is carried out, and kept


def test_a_run_waits_for_the_training_that_it_continues(recipe, corpus, tmp_path, monkeypatch):
    _, made = resolve_sweep(corpus, "--recipe", recipe, "--out", tmp_path / "x")
    rope, yarn = made
    stages = {cell: cell.remaining_stages() for cell in made}
    waiting = [(yarn, stages[yarn]), (rope, stages[rope])]
    assert local_executor._next_ready(waiting, [])[0] is rope
    job = local_executor._ActiveRun(rope, stages[rope], 0)
    assert local_executor._next_ready(waiting[:1], [job]) is None
    del job.stages[0]
    assert local_executor._next_ready(waiting[:1], [job])[0] is yarn
    # where it failed, this one is not begun
    failures = local_executor.run_stages({yarn: stages[yarn]}, made, [{}])
    assert failures == [f"{yarn.name} was not trained: {rope.name} has to be finished before"]
    assert not yarn.folder.train_log.exists()


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.release)])
def test_a_sweep_on_two_texts_with_a_continued_method_goes_on(recipe, corpus, other, tmp_path, undrawn, killed):
    """SIGKILL of the sweep ends its trainers; the next call keeps what was finished before."""
    out = tmp_path / "out"
    command = ["sweep", corpus, "--recipe", recipe, "--eval-data", f"more={other}", "--out", out, "--jobs", "1"]
    command = [*map(str, command), "--device", "cpu"]
    first, second = out / "runs/rope-seed1", SweepFolder(out).run_folder(Method("yarn", "", continues="rope"), 1).path
    run_here(*command, "--methods", "rope", *QUIET)
    finished = [first / "eval.jsonl", first / "checkpoints/checkpoint_last.pt"]
    before = [path.stat().st_mtime_ns for path in finished]
    assert len(json_files.read_json_lines(finished[0])) == 4
    if killed:
        trainer = f"--save-dir\0{second}"
        with begin([*PROGRAM, *command, *QUIET], tmp_path / "log") as process:
            wait_for(lambda: processes_about("fairseq_rpe.runs.launch", trainer), process, tmp_path / "log")
        wait_for(lambda: not processes_about(trainer))
    assert run_here(*command, *QUIET).stdout.count("| yarn") == 2  # a table for each text
    assert before == [path.stat().st_mtime_ns for path in finished]

    record = json_files.read_json(second / "checkpoints/run.json")
    assert record["settings"]["tokens"] == 64 and record["finished"]["updates"] == 3
    assert record["settings"]["finetune_from"] == files.sha256_of_files(finished[1])
    assert "loading pretrained model from" in (second / "train.log").read_text()
    assert "finetune_from" not in json_files.read_json(first / "checkpoints/run.json")["settings"]
    for name in ("", "-more"):
        found = [(row["encoding"], row["length"]) for row in table(out / f"results{name}.csv")]
        assert found == [(method, length) for method in ("rope", "yarn") for length in ("32", "64")]
        assert (out / f"ppl{name}.png").exists() and (out / f"ppl{name}.pdf").exists()
    page, folder = (out / "report.html").read_text(), SweepFolder(out)
    continued = "yarn continues the training of rope for 3 updates at 64 tokens. Continued methods have had more"
    assert "Perplexity on more" in page and continued in page
    # nothing is left to do, and what is on record says so
    sweep, made = resolve_sweep(*command[1:-2], *QUIET)
    assert folder.read_record().methods["yarn"].further == OptimizationSettings(
        tokens=64, batch_sentences=2, updates=3, lr=1e-3, warmup=1
    )
    assert report_files.current_summary(folder) is not None and sweep.evaluate == {"more": other}
    assert all(cell.parent is None or cell.parent is made[0] for cell in made)
    assert not any(cell.remaining_stages() for cell in made)


def test_another_text_of_the_same_name_is_another_sweep(corpus, other, tmp_path):
    given = [corpus, "--encodings", "alibi", "--tokens", "32", "--lengths", "64", "--out", tmp_path / "x"]
    SweepFolder(tmp_path / "x").write_record(merged_record(*given, "--eval-data", f"more={other}"))
    # without it, the text stays on record
    assert set(merged_record(*given).evaluate) == {"more"}
    changed = shutil.copytree(other, tmp_path / "changed")
    for end in ("bin", "idx"):
        shutil.copy(corpus / f"train.{end}", changed / f"test.{end}")
    with pytest.raises(UserError, match="holds another text 'more'"):
        merged_record(*given, "--eval-data", f"more={changed}")


def test_a_sweep_on_one_text_is_on_record_as_before(corpus, tmp_path):
    given = [corpus, "--encodings", "alibi", "--tokens", "32", "--lengths", "64", "--out", tmp_path / "x"]
    folder = SweepFolder(tmp_path / "x")
    folder.write_record(merged_record(*given))
    record = json_files.read_json(folder.record_path)
    assert list(record["methods"]["alibi"]) == ["rpe", "positions_train", "positions_eval"]
    assert "evaluate" not in record and "finetune_from" not in record["settings"]
    text = folder.record_path.read_text()
    folder.write_record(folder.read_record())
    assert folder.record_path.read_text() == text
