"""Sweeps: nothing is done twice, nothing is lost, failures are told, and the table says what was measured."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import run, run_here
from refusal import refusal
from sweep_commands import (
    BROKEN,
    DRY,
    SMALL,
    add_results,
    dry_run_lines,
    finished_sweep,
    merged_record,
    refused,
    resolve_sweep,
    table,
)

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.reports import report_files
from fairseq_rpe.reports.extrapolation_definition import _predict_method
from fairseq_rpe.reports.kind_report import load_results
from fairseq_rpe.reports.write import write_report
from fairseq_rpe.runs.child_output import last_error
from fairseq_rpe.sweeps import costs, local_executor
from fairseq_rpe.sweeps.sweep_record import EvaluationText, SweepFolder, slug
from fairseq_rpe.utils import files, json_files

OPTIONS = ["--tokens", "32", "--batch-sentences", "4", "--device", "cpu", "--lengths", "64,128"]


def sweep_command(data: Path, out: Path, encodings: str, updates: int = 2, *more: str) -> list[str]:
    base = ["sweep", str(data), "--encodings", encodings, "--out", str(out), "--updates", str(updates)]
    return [*base, *OPTIONS, *more, *SMALL]


@pytest.fixture(scope="module")
def swept(corpus: Path, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess, Path]:
    """A sweep of a good and a broken encoding: its folder, what it said, the module with the broken one."""
    folder = tmp_path_factory.mktemp("sweep")
    module = folder / "broken.py"
    module.write_text(BROKEN)
    command = sweep_command(corpus, folder / "out", "alibi broken", 2, "--rpe-module", str(module))
    return folder / "out", run_here(*command, ok=False), module


def test_a_failing_run_is_told_and_does_not_stop_the_others(swept, corpus):
    out, done, _ = swept
    assert done.returncode == 1
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "broken-seed1 failed while training: " in error and "this encoding is broken" in error
    assert f"log: {out}/runs/broken-seed1/train.log" in error and "Traceback" not in done.stderr

    rows = table(out / "results.csv")
    columns = ["encoding", "length", "ppl", "loss_base2", "tokens", "ratio", "seed"]
    assert list(rows[0]) == [*columns, "standard_error", "low", "high", "clusters", "cluster_unit"]
    assert [(r["encoding"], r["length"]) for r in rows] == [("alibi", "32"), ("alibi", "64"), ("alibi", "128")]
    first, *_, last = (float(r["ppl"]) for r in rows)
    assert [float(rows[n]["ratio"]) for n in (0, 2)] == pytest.approx([1.0, last / first])
    assert {int(r["tokens"]) for r in rows} == {corpus_files.count_tokens(corpus, "test")}
    shown = (out / "results.md").read_text()
    assert shown in done.stdout and "128 / 32" in shown
    assert all(str(out / name) in done.stdout for name in ("results.csv", "ppl.png", "tensorboard"))
    assert [(out / f"ppl.{end}").read_bytes()[:4] for end in ("png", "pdf")] == [b"\x89PNG", b"%PDF"]
    assert any((out / "tensorboard" / "alibi-seed1").rglob("events*"))
    [judged] = table(out / "extrapolation.csv")
    assert (judged["encoding"], judged["prediction"]) == ("alibi", "converges")
    assert judged["heads_converging"] == judged["heads"] == "4"
    worst = max(abs(float(r["ratio"]) - 1) for r in rows)
    assert float(judged["largest_deviation"]) == pytest.approx(worst)
    # trained for a few updates only
    assert judged["extrapolates"] == "no verdict" and "Definition 0.1" in shown


def test_a_sweep_notes_its_commands_and_environment(swept, corpus):
    out, _, module = swept
    state = json_files.read_json(out / "sweep.json")
    noted = state["commands"]
    assert list(noted) == ["alibi-seed1", "broken-seed1"] and list(noted["alibi-seed1"]) == ["training", "evaluating"]
    assert state["data"] == str(corpus) and state["encodings"] == ["alibi", "broken"]
    assert state["lengths"] == [32, 64, 128] and state["seeds"] == [1]
    command = sweep_command(corpus, out, "alibi", 2, "--rpe-module", str(module), *DRY)
    printed = [line for line in run_here(*command).stdout.splitlines() if not line.startswith("#")]
    assert [noted["alibi-seed1"]["training"], noted["alibi-seed1"]["evaluating"]] == [[line] for line in printed]
    [start] = json_files.read_json(out / "runs/alibi-seed1/checkpoints/environment.json")["starts"]
    assert start["from_update"] == 0 and start["gpus"] == [] and start["torch"] and start["working_folder"]
    page = (out / "report.html").read_text()
    assert start["time"] in page and "trained at 32 tokens" in page


def test_finished_runs_are_not_redone_and_need_no_torch(swept, corpus):
    out, _, module = swept
    before = {p: p.stat().st_mtime_ns for p in (out / "runs" / "alibi-seed1").rglob("*") if p.is_file()}
    command = sweep_command(corpus, out, "alibi", 2, "--rpe-module", str(module))
    code = (
        "import sys\nfrom fairseq_rpe.cli.main import main\n"
        f"assert main({command!r}) == 0\nassert not {{'torch', 'fairseq'}} & set(sys.modules)"
    )
    assert "alibi" in run(sys.executable, "-c", code).stdout
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_evaluations_that_are_cut_off_come_to_the_same(swept, corpus, undrawn):
    """Of a finished run some results are lost, the last of them in the middle of its line."""
    out, _, module = swept
    results, before = out / "runs/alibi-seed1/eval.jsonl", table(out / "results.csv")
    for kept_lines, torn in (((), 1), ((0, 2), 40)):
        lines = results.read_text().splitlines(keepends=True)[:3]
        results.write_text("".join(lines[n] for n in kept_lines) + lines[2][:torn])
        run_here(*sweep_command(corpus, out, "alibi", 2, "--rpe-module", str(module)))
        assert table(out / "results.csv") == before


def test_refusals_in_one_line(swept, corpus, tmp_path):
    """More of them: tests/test_bad_input.py."""
    out, _, module = swept
    own = sweep_command(corpus, out, "alibi", 2, "--rpe-module", str(module))
    assert "(updates is 2 there, 8 here)" in refusal(*own[: -len(SMALL)], "--updates", 8, *SMALL)
    with files.exclusive_lock(out / ".lock", "busy"):
        assert "another sweep is running" in refusal(*own)
    assert "less than one block" in refusal(*sweep_command(corpus, tmp_path / "x", "alibi", 2, "--lengths", "999999"))
    assert not (tmp_path / "x").exists()
    assert "are the same encoding" in refusal(*sweep_command(corpus, tmp_path / "x", "kerple_log kerple_log:a=none"))
    for folder in (out / "runs/alibi-seed1", out / "runs/alibi-seed1/checkpoints"):
        assert "is the folder of a run" in refusal(*sweep_command(corpus, folder, "alibi"))


def test_dry_run_prints_training_and_evaluation_of_each_cell(corpus, tmp_path):
    argv = sweep_command(corpus, tmp_path / "x", "alibi type1:variant=paper", 6, "--seeds", "1,2")
    lines = dry_run_lines(*argv[1:])
    assert len(lines) == 8 and not (tmp_path / "x").exists()
    trained = [line for line in lines if " train " in line]
    assert len(trained) == len({line.split("--out ")[1].split()[0] for line in trained}) == 4
    assert sum(" eval " in line and "--lengths 32,64,128" in line for line in lines) == 4
    # with two processes, how they are started
    _, starts, _ = dry_run_lines(*sweep_command(corpus, tmp_path / "x", "alibi", 2, "--nproc", "2")[1:])
    assert starts.startswith("# starts: ") and "--nproc-per-node 2 --standalone -m fairseq_rpe.runs.launch " in starts


def test_a_full_disk_ends_a_run_in_one_line_and_the_same_command_goes_on(swept, corpus, tmp_path, undrawn):
    """``ulimit -f`` fails the writing of a checkpoint half way, as a full disk does."""
    out = tmp_path / "out"
    shutil.copytree(swept[0], out)
    folder = out / "runs/alibi-seed1"
    unchanged = {p: p.stat().st_mtime_ns for p in (folder / "checkpoints/checkpoint_last.pt", folder / "eval.jsonl")}
    both = sweep_command(corpus, out, "alibi nope", 2, "--rpe-module", str(swept[2]))
    smaller = (folder / "checkpoints/checkpoint_last.pt").stat().st_size * 3 // 4
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (smaller, unlimited[1]))
    try:
        done = run_here(*both, ok=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "nope-seed1 failed while training: checkpoint " in line and "could not be written (" in line
    assert "free some space and rerun" in line
    left = {path.name for path in (out / "runs/nope-seed1/checkpoints").iterdir()}
    assert left == {".lock", "run.json", "environment.json"}
    assert "alibi" in done.stdout and "| nope" not in done.stdout
    run_here(*both)
    assert unchanged == {p: p.stat().st_mtime_ns for p in unchanged}
    assert [row["encoding"] for row in table(out / "results.csv")] == ["alibi"] * 3 + ["nope"] * 3


def test_report_table(tmp_path, undrawn):
    """Of each method its own results alone."""
    finished_sweep(tmp_path, {"alibi": {64: 50.0, 128: 49.0}, "type1:variant=paper": {64: 40.0}})
    others = ({"checkpoint": "older"}, {"positions": "offset"}, {"rpe": "nope"}, {"split": "valid"})
    others += ({"compute_dtype": "bf16"}, {"attention_prune": 0.1})
    add_results(tmp_path / "runs/alibi-seed1", *({"length": 64, "ppl": 1.0, **other} for other in others))
    assert "128 / 64" in run_here("report", tmp_path).stdout
    text = (tmp_path / "results.md").read_text()
    assert text.startswith(
        "| encoding            |    64 |   128 |   128 / 64 |\n"
        "|:--------------------|------:|------:|-----------:|\n"
        "| alibi               | 50.00 | 49.00 |      0.980 |\n"
        "| type1:variant=paper | 40.00 |       |            |\n"
    )
    made = ["extrapolation.csv", "ppl.pdf", "ppl.png", "report.html", "results.csv", "results.md", "tensorboard"]
    assert sorted(os.listdir(tmp_path)) == sorted([*made, "effective_length.csv", "runs", "sweep.json"])


def test_report_averages_seeds_and_redraws_only_when_asked(tmp_path, undrawn):
    folder = finished_sweep(tmp_path, {"alibi": {64: 50.0, 128: 60.0}}, seeds=(1, 2))
    assert report_files.current_summary(folder) is None
    said = write_report(folder).text
    assert "| alibi      | 51.00 | 61.00 |" in (tmp_path / "results.md").read_text()
    drawn = (tmp_path / "ppl.png").stat().st_mtime_ns
    assert report_files.current_summary(folder) == said and (tmp_path / "ppl.png").stat().st_mtime_ns == drawn
    assert write_report(folder).text == said and (tmp_path / "ppl.png").stat().st_mtime_ns > drawn
    (tmp_path / "ppl.pdf").unlink()
    assert report_files.current_summary(folder) is None


def test_the_report_has_a_table_and_a_figure_for_each_text(tmp_path, undrawn):
    texts = {"own": 40.0, "arxiv": 90.0, "github": 8.0}
    evaluate = {name: {"data": f"data-bin/{name}", "digest": name} for name in ("arxiv", "github")}
    folder = finished_sweep(tmp_path, {"alibi": {64: 40.0, 128: 20.0}}, evaluate=evaluate)
    rows = [{"length": n, "ppl": ppl * 64 / n, "data": name} for name, ppl in texts.items() for n in (64, 128)]
    add_results(tmp_path / "runs/alibi-seed1", *rows)
    said = write_report(folder).text
    plain = " ".join(said.split())
    for name, first in (("", "40.00 | 20.00"), (" on arxiv", "90.00 | 45.00"), (" on github", "8.00 | 4.00")):
        assert f"| alibi | {first} |" in plain and (not name or f"Perplexity per token{name} by" in said)
    assert folder.read_record().evaluate["arxiv"] == EvaluationText("data-bin/arxiv", "arxiv")
    assert report_files.current_summary(folder) == said
    add_results(tmp_path / "runs/alibi-seed1", {**rows[2], "length": 256})
    assert report_files.current_summary(folder) is None
    write_report(folder)
    (tmp_path / "ppl-github.pdf").unlink()
    assert report_files.current_summary(folder) is None


def test_an_interrupted_report_is_written_again(tmp_path, undrawn, monkeypatch):
    """The process dies before each file of the report in turn. The only new result is on a further text."""
    evaluate = {"arxiv": {"data": "data-bin/arxiv", "digest": "arxiv"}}
    folder = finished_sweep(tmp_path, {"alibi": {64: 40.0, 128: 20.0}}, evaluate=evaluate)
    result = {"length": 64, "ppl": 90.0, "data": "arxiv"}
    add_results(tmp_path / "runs/alibi-seed1", result)
    write_report(folder)
    # results.csv, results-arxiv.csv, extrapolation.csv, effective_length.csv, report.html and results.md
    files_of_a_report = 6
    for file_count in range(files_of_a_report):
        syncs = iter(range(file_count))

        def sync_or_die(handle: int, syncs: Iterator[int] = syncs) -> None:
            if next(syncs, None) is None:
                raise KeyboardInterrupt

        add_results(tmp_path / "runs/alibi-seed1", {**result, "ppl": 80.0 - file_count})
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, "fsync", sync_or_die)  # every file is synced before it gets its name
            write_report(folder)
        assert report_files.current_summary(folder) is None
    assert "75.00" in write_report(folder).text and report_files.current_summary(folder) is not None


def test_one_draw_for_each_block_takes_the_place_of_an_older_one(tmp_path):
    moved = "randomized:max_position=200"
    methods = {"rope": {"rpe": "rope", "positions_eval": moved}}
    folder = finished_sweep(tmp_path, {"rope": {64: 50.0, 128: 50.0}}, methods=methods)
    rows = ({"length": 64, "draws": 1, "ppl": 8.0}, {"length": 64, "ppl": 9.0}, {"length": 128, "ppl": 7.0})
    rows += ({"length": 64, "draws": 5, "ppl": 6.0},)
    add_results(tmp_path / "runs/rope-seed1", *({"positions": moved, **row} for row in rows))
    assert [(one.result.length, one.result.ppl) for one in load_results(folder, folder.read_record()).results] == [
        (64, 8),
        (128, 7),
    ]


def test_a_method_is_evaluated_as_far_as_its_positions_reach(corpus, tmp_path):
    place = ["--recipe", "warping-lm", "--methods", "rope randomized-2x", "--out", tmp_path / "x", "--tokens", "64"]
    said = dry_run_lines(corpus, *place, "--lengths", "96,128,200,300")
    why = "# randomized-2x: its positions end at 128 tokens, so it is not evaluated at 2 lengths from 200 to 300"
    assert [line for line in said if line.startswith("#")] == [why]
    lengths = [line.partition(" --lengths ")[2].split()[0] for line in said if " eval " in line]
    assert lengths == ["64,96,128,200,300", "64,96,128"]
    table = ["--encodings", "learned:max_positions=100", "--out", tmp_path / "x", "--tokens", "64"]
    said = "\n".join(dry_run_lines(corpus, *table, "--lengths", "96,128"))
    assert "its positions end at 100 tokens, so it is not evaluated at 128" in said and said.endswith("--lengths 64,96")
    words = ["--positions-eval", "offset:tokens=100", "--lengths", "96", *DRY]
    assert "no length has enough positions with 'offset:tokens=100'" in refusal("sweep", corpus, *table, *words)
    task = ["--recipe", "warping-algorithmic", "--methods", "randomized-3x", "--algorithms", "copy:items=3,test=600"]
    said = "\n".join(dry_run_lines(*task))
    # 8 tokens in training, and 2 n + 2 for n items
    assert "end at 11 items, so it is not evaluated at 4 lengths from 12 to 15" in said
    assert "--lengths 2,3,4,5,6,7,8,9,10,11 " in said
    message = "not evaluated at 12: give smaller --lengths, or leave the method out"
    assert message in refused(*task, "--lengths", "12", *DRY)


def test_the_report_says_where_positions_end(tmp_path, undrawn):
    moved = {"rpe": "alibi", "positions_eval": "randomized:times=2"}
    ppl = {"rope": {64: 50.0, 128: 60.0, 256: 70.0}, "alibi": {64: 40.0}}
    folder = finished_sweep(tmp_path, ppl, methods={"alibi": moved})
    rows = ({"positions": moved["positions_eval"], "draws": 1, "length": n, "ppl": 41.0} for n in (64, 128))
    add_results(tmp_path / "runs/alibi-seed1", *rows)
    write_report(folder)
    assert "| alibi      | 41.00 | 41.00 | ends at 128 |" in (tmp_path / "results.md").read_text()
    state = folder.read_record()
    for length, why in ((256, "positions are transformed, and end at 128"), (128, "positions are transformed")):
        assert str(_predict_method(replace(state, lengths=(64, length)), state.method("alibi"), [])) == why
    assert "Ends at N: the method has positions for at most N tokens" in (tmp_path / "report.html").read_text()


def test_a_mean_over_fewer_items_is_not_compared(tmp_path, undrawn):
    task, moved = "copy:items=3,test=60", "randomized:times=3"
    methods = {"rope": {"rpe": "rope", "positions_eval": None}}
    methods["few"] = {"rpe": "rope", "positions_eval": moved, "positions_train": moved}
    about = {"layout": 2, "settings": {"split": "test"}, "encodings": list(methods), "seeds": [1], "lengths": [2, 15]}
    json_files.write_json(tmp_path / "sweep.json", {**about, "methods": methods, "algorithms": [task]})
    folder = SweepFolder(tmp_path)
    for name, positions, end, right in (("rope", None, 15, 5), ("few", moved, 11, 9)):
        run = folder.run_folder(folder.read_record().method(name), 1, task)
        json_files.write_json(run.checkpoints.path / "run.json", {"layout": 2, "finished": {"checkpoint": "c"}})
        of = {"checkpoint": "c", "algorithm": task, "split": "test", "positions": positions}
        of |= {"transform": positions or "identity", "examples": 10, "right": right, "accuracy": right / 10}
        for n in range(2, end + 1):
            json_files.append_json_line(run.results, {**of, "length": n})
    section = write_report(folder)
    means, _, _ = (tmp_path / "accuracy.md").read_text().partition("\n\n")  # the first table
    assert means.count("90.0 (to 11)") == 2 and means.count("50.0") == 3
    assert "the method has positions for at most N items" in (tmp_path / "report.html").read_text()
    assert any("beyond the training range: rope, 50.0 %" in line for line in section.lead)


def test_names_of_runs_never_collide():
    specs = ["a:x=1,y=2", "a:x=1-y=2", "a-x=1-y=2", "a:x=1;y=2", "a"]
    names = {slug(spec, seed) for spec in specs for seed in (1, 2)}
    assert len(names) == 10 and all("/" not in n and ":" not in n and " " not in n for n in names)


def test_last_error_prefers_the_cause(tmp_path):
    log = tmp_path / "train.log"
    assert last_error(log) == ""
    memory = "OSError: [Errno 12] Cannot allocate memory"
    ignored = "Exception ignored in: <function Data.__del__ at 0x7f>\nTraceback (most recent call last):\n"
    for text, expected in (
        ("Traceback\nValueError: bad shape\nerror: fairseq-train ended with code 1", "ValueError: bad shape"),
        ("error: unknown encoding 'x'", "unknown encoding 'x'"),
        ("2026 | INFO | fine\nKilled", "Killed"),
        ("[rank1]: KeyError: 'x'\n[rank0]: RuntimeError: Connection closed by peer\nE1 failed", "KeyError: 'x'"),
        (f"{memory}\n{ignored}AttributeError: 'Data' object has no attribute '_map'", memory),
        ("", ""),
    ):
        log.write_text(text)
        assert last_error(log) == expected
    log.write_text("ValueError: of an earlier start\nValueError: of this one")
    assert last_error(log, start=32) == "ValueError: of this one"


def test_progress_reads_only_whole_lines(tmp_path):
    log = tmp_path / "train.log"
    following = local_executor.TrainingLogFollower(log)
    line = 'x | INFO | train_inner | {"epoch": 1, "loss": "7.25", "num_updates": "25"}\n'
    log.write_text(line + line.replace("25", "50")[:40])
    following.read()
    assert (following.updates, following.loss) == (25, 7.25)
    log.write_text(line + line.replace("7.25", "6.5").replace('"25"', '"50"'))
    following.read()
    assert (following.updates, following.loss) == (50, 6.5)


def test_the_bar_goes_by_what_the_work_costs(corpus, tmp_path):
    """An update is three passes over its batch; an evaluation one over the text, the dearer the longer its blocks."""
    _, [cell] = resolve_sweep(*sweep_command(corpus, tmp_path, "alibi", 100, "--lengths", "64,2000")[1:])
    tokens, at_32 = corpus_files.count_tokens(corpus, "test"), 1 + 32 / 2000
    work = costs.RunCost.from_run(cell)
    assert work.update == pytest.approx(3 * 4 * 32 * at_32)
    assert work.results == pytest.approx([tokens * at_32, tokens * (1 + 64 / 2000), tokens * 2])
    assert work.spent(50, 0) == pytest.approx(50 * work.update)
    assert work.spent(100, 2) + work.results[2] == pytest.approx(work.total) == work.spent(999, 9)


def test_an_update_costs_as_many_batches_as_it_has(corpus, tmp_path):
    more = ("--update-freq", "2", "--nproc", "3")
    _, [cell] = resolve_sweep(*sweep_command(corpus, tmp_path, "alibi", 100, *more)[1:])
    assert costs.RunCost.from_run(cell).update == pytest.approx(2 * 3 * 3 * 4 * 32 * (1 + 32 / 2000))


def test_the_bar_of_generated_tasks(tmp_path):
    _, [cell] = resolve_sweep("--algorithms", "copy:items=4,test=70", "--encodings", "nope", "--out", tmp_path)
    results = costs.RunCost.from_run(cell).results
    assert (
        len(results) == sum(len(one.keys) for one in cell.evaluations) and results == sorted(results) and results[0] > 0
    )


def test_a_setting_that_is_left_out_later_makes_another_sweep(corpus, tmp_path):
    base = sweep_command(corpus, tmp_path, "alibi", 6)[1 : -len(SMALL)]
    linear, bf16 = ("--schedule", "linear"), ("--compute-dtype", "bf16")
    for more, words in ((linear, "schedule is 'linear' there, 'inverse_sqrt' here"), (bf16, "'bf16' there")):
        given = [*base, "--out", tmp_path / more[1]]
        SweepFolder(tmp_path / more[1]).write_record(merged_record(*given, *more))
        assert merged_record(*given, *more).encodings == ("alibi",)
        with pytest.raises(UserError, match=words):
            merged_record(*given)


def test_a_dry_run_estimates_costs_if_the_vocabulary_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without the folder of the text
    command = ["sweep", "--recipe", "fire-lm", "--methods", "rope", *DRY]
    assert "# no estimate of costs before data-bin" in run_here(*command).stdout.splitlines()[-1]
    estimate = run_here(*command, "--preset", "paper", "--seeds", "1,2").stdout.splitlines()[-1]
    assert estimate.startswith("# estimate: rope-seed1 (2 seeds): 123,659,520 parameters, 2.69e+20 FLOPs of training")
