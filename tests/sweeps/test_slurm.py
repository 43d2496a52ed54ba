"""Sweeps on a cluster: what is printed for SLURM, and whole sweeps through submitit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_slurm
import pytest
from conftest import PROGRAM, run_here
from live_processes import begin, processes_about, wait_for
from refusal import refusal
from sweep_commands import BROKEN, QUIET, parse, table

from fairseq_rpe.cli.sweep import resolve_sweep
from fairseq_rpe.data import folder
from fairseq_rpe.sweeps import slurm
from fairseq_rpe.sweeps.resolve import Inputs
from fairseq_rpe.sweeps.sweep_kind import sweep_kind
from fairseq_rpe.utils import files, json_files


def command(data: Path, out: Path, encodings: str, *more: str, device: str = "cpu") -> list[str]:
    base = ["sweep", str(data), "--encodings", encodings, "--out", str(out), "--tokens", "32", "--device", device]
    return [*base, "--batch-sentences", "4", "--lengths", "64", *more, *QUIET]


class Run:
    """What SLURM's jobs need of a run of a sweep."""

    def __init__(self, name: str, lock: Path, parent: Run | None = None) -> None:
        self.name, self.parent, self.folder = name, parent, SimpleNamespace(lock=lock)


def submitted(folder: Path) -> dict[str, str]:
    """What sbatch was given: job numbers with their scripts."""
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.sh"))}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[Path]:
    pytest.importorskip("submitit", reason="needs the extra slurm")
    folder = tmp_path / "programs"
    for name, value in fake_slurm.install(folder).items():
        monkeypatch.setenv(name, value)
    yield folder
    for path in folder.glob("*.daemon"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def test_a_dry_run_prints_the_jobs_and_torchrun_and_needs_no_launcher(corpus, tmp_path):
    given = "--slurm partition=gpu --slurm exclude=n1,n2 --slurm additional_parameters.mail-type=END"
    given += " --launcher dry-run --nproc 8 --nodes 2 --jobs 3"
    out, setup = tmp_path / "it's a=b, c", ("--slurm", "setup=[module load cuda]")
    lines = run_here(*command(corpus, out, "alibi type1:variant=paper", *given.split(), *setup, device="auto")).stdout
    first, *lines = lines.splitlines()
    assert first.startswith("# an array of 2 SLURM jobs: ") and not out.exists()
    for setting in ("nodes=2", "tasks_per_node=1", "gpus_per_node=8", "array_parallelism=3", "partition=gpu"):
        assert f" {setting}," in first
    jobs = [line for line in lines if line.startswith("# job")]
    assert jobs == ["# job alibi-seed1:", "# job type1-variant=paper-995da3-seed1:"]
    starts = [line for line in lines if line.startswith("# starts: ")]
    assert len(starts) == 2
    nodes = "--nproc-per-node 8 --nnodes 2 --node-rank $SLURM_NODEID --master-addr $("
    for line in starts:
        assert f"-m torch.distributed.run {nodes}" in line
        assert "--distributed-world-size 16" in line and "gloo" not in line
    assert sum(" train " in line for line in lines) == sum(" eval " in line for line in lines) == 2


def test_sbatch_is_given_the_settings(corpus, tmp_path, cluster):
    """As submitit writes them: common ones, those of SLURM, sbatch's own, and commands before the job."""
    given = [("partition", "gpu"), ("exclude", "n1,n2"), ("additional_parameters.mail-type", "END")]
    given += [("setup", "[module load cuda, module load gcc]"), ("timeout_min", "90"), ("mem_gb", "16")]
    given += [("gpus_per_node", "null"), ("gres", "gpu:4"), ("additional_parameters.requeue", "true")]
    argv = command(corpus, tmp_path / "out", "alibi", "--nproc", "8", "--jobs", "3", device="auto")
    sweep = resolve_sweep(parse(argv))
    [job] = slurm.make_executor(sweep, given).map_array(print, ["nothing"])
    [script] = submitted(cluster).values()
    for line in ("partition=gpu", "exclude=n1,n2", "mail-type=END", "time=90", "mem=16GB", "gres=gpu:4"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --requeue\n" in script and "gpus-per-node" not in script
    assert "\nmodule load cuda\nmodule load gcc\n" in script and job.paths.folder.parent == tmp_path / "out/slurm"
    with pytest.raises(files.UserError, match="--slurm: .*partitoin"):
        slurm.make_executor(sweep, [("partitoin", "gpu")])
    assert slurm.job_settings(sweep, [("setup", "module load cuda")])["setup"] == ["module load cuda"]
    with pytest.raises(files.UserError, match="write additional_parameters.NAME=x"):
        slurm.make_executor(sweep, [("additional_parameters", "x")])
    for value in ("NaN", "Infinity", "0", "true", "big"):
        with pytest.raises(files.UserError, match=f"--slurm mem_gb={value}: write a number above 0"):
            slurm.job_settings(sweep, [("mem_gb", value)])
    (cluster / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(files.UserError, match="sbatch refuses the jobs: .*invalid partition.*correct --slurm"):
        slurm.submit_and_wait(sweep, [], {Run("run", tmp_path / ".lock"): []})


def test_refusals_in_one_line(corpus, tmp_path, monkeypatch):
    def refused(*more: str) -> str:
        return refusal(*command(corpus, tmp_path / "x", "alibi", *more))

    assert "--slurm needs --launcher slurm" in refused("--slurm", "partition=gpu")
    assert "needs --launcher slurm" in refused("--nodes", "2")
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "pip install -c requirements/constraints.txt -e '.[slurm]'" in refused("--launcher", "slurm")
    monkeypatch.delitem(sys.modules, "submitit")
    pytest.importorskip("submitit", reason="needs the extra slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch here" in refused("--launcher", "slurm")
    for setting, words in (
        ("x", "is not KEY=VALUE"),
        ("nodes=2", "cannot be set here: --nodes"),
        ("a b=c", "KEY=VALUE"),
    ):
        assert words in refused("--launcher", "slurm", "--slurm", setting)
    assert not (tmp_path / "x").exists()


def test_a_job_does_what_is_left_of_a_run_and_one_that_an_earlier_job_is_busy_with_is_left_to_it(
    corpus, tmp_path, monkeypatch, undrawn
):
    """The jobs run in this process, without SLURM."""
    out, submitted_runs = tmp_path / "out", []

    def map_array(job, runs):
        submitted_runs.extend(cell.name for cell in runs)
        for cell in runs:
            job(cell)
        return [SimpleNamespace(job_id="1", done=lambda: True, exception=lambda: None)]

    monkeypatch.setattr(slurm, "check_slurm", lambda: None)
    monkeypatch.setattr(slurm, "make_executor", lambda *_: SimpleNamespace(map_array=map_array))
    with files.exclusive_lock(out / "runs/nope-seed1/.lock", "busy"):
        done = run_here(*command(corpus, out, "alibi nope", "--updates", "4", "--launcher", "slurm"), ok=False)
    assert done.returncode == 1 and submitted_runs == ["alibi-seed1"]
    assert "nope-seed1 is already being run by a job of an earlier call: leaving it to that job" in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "nope-seed1 is not finished: another job is busy with it" in line
    assert [row[:2] for row in results(out)] == [("alibi", "32"), ("alibi", "64")]


def test_a_run_waits_for_the_busy_one_that_it_continues(tmp_path, monkeypatch):
    parent = Run("first", tmp_path / ".lock")
    child = Run("second", tmp_path / ".lock2", parent)
    monkeypatch.setattr(slurm, "_submit", None)  # no job is submitted
    with files.exclusive_lock(parent.folder.lock, "busy"):
        _, line = slurm.submit_and_wait(None, [], {parent: [], child: []})
    assert line.startswith("second is not started: it continues first, which another job is busy with")


def results(out: Path) -> list[tuple[str, str, float]]:
    return [(row["encoding"], row["length"], float(row["ppl"])) for row in table(out / "results.csv")]


@pytest.mark.release
def test_a_sweep_on_slurm_survives_preemption_and_equals_a_local_one(corpus, tmp_path, cluster):
    """One job is told to make room in the middle of its training and requeued; another fails and is told."""
    out, module = tmp_path / "out", tmp_path / "broken.py"
    module.write_text(BROKEN)
    own = ["--updates", "300", "--rpe-module", str(module)]
    argv = command(corpus, out, "alibi broken", "--launcher", "slurm", "--slurm", "partition=gpu", *own)
    last, notes = out / "runs/alibi-seed1/checkpoints/checkpoint_last.pt", out / "slurm/100_0"
    with begin([*PROGRAM, *argv], tmp_path / "log") as process:
        wait_for(last.exists, process, tmp_path / "log")  # there is one after each epoch
        [job] = set(processes_about(f"-u\0-m\0submitit.core._submit\0{out}")) - set(processes_about("\0srun\0"))
        os.kill(job, signal.SIGUSR2)
        assert process.wait(300) == 1, (tmp_path / "log").read_text()[-2000:]
    said = (tmp_path / "log").read_text()
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "broken-seed1 is not finished, training is left: " in error
    assert "this encoding is broken" in error and "Traceback" not in said

    [(number, script)] = submitted(cluster).items()
    assert "#SBATCH --partition=gpu" in script and "#SBATCH --array=0-1%2" in script
    assert "#SBATCH --ntasks-per-node=1" in script and "#SBATCH --signal=USR2@" in script
    assert "-m submitit.core._submit" in script and "gpus" not in script
    assert (cluster / f"{number}_0.requeued").exists(), (notes / "100_0_0_log.err").read_text()
    starts = json_files.read_json(last.parent / "environment.json")["starts"]
    assert [start["from_update"] == 0 for start in starts] == [True, False] and starts[1]["from_update"] < 300
    assert [row["length"] for row in json_files.read_json_lines(out / "runs/alibi-seed1/eval.jsonl")] == [32, 64]

    # nothing is done twice: only the run that failed is submitted again
    before = last.stat().st_mtime_ns
    again = run_here(*argv, ok=False)
    assert again.returncode == 1 and list(submitted(cluster)) == ["100", "101"]
    assert "of broken-seed1\n" in again.stderr and "alibi-seed1" not in again.stderr
    assert last.stat().st_mtime_ns == before
    # a finished sweep is only taken stock of, without a job
    done = command(corpus, out, "alibi", "--launcher", "slurm", *own)
    assert "alibi" in run_here(*done).stdout and len(submitted(cluster)) == 2

    run_here(*command(corpus, tmp_path / "local", "alibi", *own))
    local = results(tmp_path / "local")
    assert [row[:2] for row in results(out)] == [row[:2] for row in local] == [("alibi", "32"), ("alibi", "64")]
    assert [row[2] for row in results(out)] == pytest.approx([row[2] for row in local], rel=1e-6)


@pytest.mark.release
def test_a_run_on_two_nodes(corpus, tmp_path, cluster, monkeypatch):
    out = tmp_path / "out"
    argv = command(corpus, out, "alibi", "--updates", "4", "--launcher", "slurm", "--nodes", "2")
    monkeypatch.setattr(slurm, "_POLL_SECONDS", 0.2)
    run_here(*argv, processes=True)
    [script] = submitted(cluster).values()
    assert "#SBATCH --nodes=2" in script
    assert [name for name, _, _ in results(out)] == ["alibi", "alibi"]
    state = json_files.read_json(out / "runs/alibi-seed1/checkpoints/run.json")
    assert state["settings"]["nproc"] == 2 and state["finished"]["updates"] == 4
    assert "initialized host" in (out / "runs/alibi-seed1/train-node1.log").read_text()
    with files.exclusive_lock(out / "runs/alibi-seed1/.lock", "nobody holds it any more"):
        pass


@pytest.mark.release
def test_a_job_runs_on_this_machine_too(corpus, tmp_path):
    """The same job by submitit's local executor, without any SLURM."""
    submitit = pytest.importorskip("submitit", reason="needs the extra slurm")
    sweep = resolve_sweep(parse(command(corpus, tmp_path / "out", "nope", "--updates", "4")))
    [cell] = sweep_kind(sweep.kind).build_runs(sweep, Inputs(folder.corpus_digest(corpus)))
    [job] = submitit.LocalExecutor(tmp_path / "jobs" / "%j").map_array(slurm.SweepJob(), [cell])
    assert job.result() is None and cell.remaining_stages() == []
    assert [row["length"] for row in json_files.read_json_lines(cell.folder.results)] == [32, 64]
