"""Sweeps on a cluster: what is printed for SLURM, and a whole sweep through submitit."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_slurm
import pytest
from conftest import run_here
from live_processes import HELD_ENCODING, processes_about, wait_for
from sweep_commands import BROKEN, SMALL, dry_run_lines, refusal, resolve_sweep, table

from fairseq_rpe.core import files
from fairseq_rpe.sweeps import slurm

FIRST = 2  # updates behind the checkpoint that the preempted job goes on from


def command(data: Path, out: Path, encodings: str, *more: str) -> list[str]:
    base = ["sweep", str(data), "--encodings", encodings, "--out", str(out), "--tokens", "32", "--device", "cpu"]
    return [*base, "--batch-sentences", "4", "--lengths", "64", *more, *SMALL, "--disable-validation"]


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
    settings = ["--slurm", "partition=gpu", "--slurm", "exclude=n1,n2"]
    settings += ["--slurm", "additional_parameters.mail-type=END"]
    settings += ["--slurm", "setup=[module load cuda]", "--nproc", "8", "--nodes", "2", "--jobs", "3"]
    out = tmp_path / "it's a=b, c"
    words = command(corpus, out, "alibi type1:form=paper", "--launcher", "dry-run", *settings)
    lines = run_here(*(word.replace("cpu", "auto") for word in words)).stdout.splitlines()
    assert not out.exists()
    assert lines[0].startswith("# an array of 2 SLURM jobs: ")
    for setting in ("nodes=2", "tasks_per_node=1", "gpus_per_node=8", "array_parallelism=3", "partition=gpu"):
        assert f" {setting}," in lines[0]
    assert [line for line in lines if line.startswith("# job")] == [
        "# job alibi-seed1:",
        "# job type1-form=paper-e4e3fd-seed1:",
    ]
    starts = [line for line in lines if line.startswith("# starts: ")]
    assert len(starts) == 2
    for line in starts:
        assert (
            "-m torch.distributed.run --nproc-per-node 8 --nnodes 2 --node-rank $SLURM_NODEID --master-addr $(" in line
        )
        assert "--distributed-world-size 16" in line and "gloo" not in line
    assert sum(" train " in line for line in lines) == sum(" eval " in line for line in lines) == 2


def test_sbatch_is_given_the_settings(corpus, tmp_path, cluster):
    """As submitit writes them: common ones, those of SLURM, sbatch's own, and commands before the job."""
    given = [("partition", "gpu"), ("exclude", "n1,n2"), ("additional_parameters.mail-type", "END")]
    given += [("setup", "[module load cuda, module load gcc]"), ("timeout_min", "90"), ("mem_gb", "16")]
    given += [("gpus_per_node", "null"), ("gres", "gpu:4"), ("additional_parameters.requeue", "true")]
    words = command(corpus, tmp_path / "out", "alibi", "--nproc", "8", "--jobs", "3")[1:]
    sweep, _ = resolve_sweep(*words)
    sweep = replace(sweep, base=replace(sweep.base, device="auto"))
    made = slurm.executor(sweep, given)
    job, _ = made.map_array(print, ["nothing", "nothing"])
    [script] = submitted(cluster).values()
    for line in ("partition=gpu", "exclude=n1,n2", "mail-type=END", "time=90", "mem=16GB", "gres=gpu:4", "array=0-1%2"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --requeue\n" in script and "gpus-per-node" not in script
    assert "\nmodule load cuda\nmodule load gcc\n" in script and job.paths.folder.parent == tmp_path / "out/slurm"
    with pytest.raises(files.UserError, match="--slurm: .*partitoin"):
        slurm.executor(sweep, [("partitoin", "gpu")])


def test_a_dry_run_prints_torchrun_for_this_machine(corpus, tmp_path):
    trains, starts, evaluates = dry_run_lines(*command(corpus, tmp_path / "x", "alibi", "--nproc", "2")[1:])
    assert " train " in trains and "--nproc 2" in trains and " eval " in evaluates
    assert starts.startswith("# starts: ") and "--nproc-per-node 2 --standalone -m fairseq_rpe.runs.launch " in starts


def test_refusals_in_one_line(corpus, tmp_path, monkeypatch):
    def refused(*more: str) -> str:
        return refusal(*command(corpus, tmp_path / "x", "alibi", *more))

    assert "--slurm is for --launcher slurm" in refused("--slurm", "partition=gpu")
    assert "needs --launcher slurm" in refused("--nodes", "2")

    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "pip install -c requirements/constraints.txt -e '.[slurm]'" in refused("--launcher", "slurm")
    monkeypatch.delitem(sys.modules, "submitit")
    pytest.importorskip("submitit", reason="needs the extra slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch here" in refused("--launcher", "slurm")
    for setting, words in (("x", "is not KEY=VALUE"), ("nodes=2", "not set here: --nodes"), ("a b=c", "KEY=VALUE")):
        assert words in refused("--launcher", "slurm", "--slurm", setting)
    assert not (tmp_path / "x").exists()


def test_a_run_on_two_nodes_survives_preemption_and_a_busy_one_is_left_alone(corpus, tmp_path, cluster, monkeypatch):
    """One job is told to make room in the middle of its training, which ends the other node, and is requeued."""
    monkeypatch.setattr(slurm, "_POLL_SECONDS", 0.2)
    out, seen, module = tmp_path / "out", tmp_path / "seen", shutil.copy(HELD_ENCODING, tmp_path)
    seen.mkdir()
    (seen / "hold").write_text(str(FIRST))
    monkeypatch.setenv("HELD_NOTES", str(seen))
    common = ["--updates", "4", "--rpe-module", module]
    argv = command(corpus, out, "held nope", *common, "--launcher", "slurm", "--slurm", "partition=gpu", "--nodes", "2")
    argv += ["--save-interval-updates", str(FIRST)]

    def preempt() -> None:
        """Once both nodes are held, with a checkpoint behind them."""
        ranks = [seen / f"rank{n}.jsonl" for n in (0, 1)]
        wait_for(lambda: ended.is_set() or all(r.exists() and r.read_text().count("\n") > FIRST for r in ranks))
        for job in set(processes_about(f"-u\0-m\0submitit.core._submit\0{out}")) - set(processes_about("\0srun\0")):
            os.kill(job, signal.SIGUSR2)
        (seen / "hold").unlink()

    watcher, ended = threading.Thread(target=preempt), threading.Event()
    watcher.start()
    with files.lock(out / "runs/nope-seed1/.lock", "busy"):
        done = run_here(*argv, ok=False, processes=True)
    ended.set()
    watcher.join()
    assert done.returncode == 1, done.stderr
    assert "nope-seed1 is already being run by a job of an earlier call: leaving it to that job" in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "nope-seed1 is not finished: another job is busy with it" in line
    [(number, script)] = submitted(cluster).items()
    for setting in ("partition=gpu", "nodes=2", "ntasks-per-node=1", "signal=USR2@"):
        assert f"#SBATCH --{setting}" in script
    assert "-m submitit.core._submit" in script and "gpus" not in script
    assert (cluster / f"{number}.requeued").exists()

    run = out / "runs/held-seed1"
    state = files.read_json(run / "checkpoints/run.json")
    assert state["settings"]["nproc"] == 2 and state["finished"]["updates"] == 4
    starts = files.read_json(run / "checkpoints/environment.json")["starts"]
    assert [start["from_update"] for start in starts] == [0, FIRST]
    assert "initialized host" in (run / "train-node1.log").read_text()
    assert [row["length"] for row in files.read_json_lines(run / "eval.jsonl")] == [32, 64]
    with files.lock(run / ".lock", "nobody holds it any more"):
        pass
    run_here(*command(corpus, tmp_path / "local", "held", *common, "--update-freq", "2"))
    local, here = (table(place / "results.csv") for place in (tmp_path / "local", out))
    assert [row["encoding"] for row in here] == [row["encoding"] for row in local] == ["held", "held"]
    assert [float(row["ppl"]) for row in here] == pytest.approx([float(row["ppl"]) for row in local], rel=1e-5)


def test_a_failing_job_is_told_and_alone_submitted_again(corpus, tmp_path, monkeypatch):
    """Jobs are carried out here, as they come out of submitit's file."""
    out, module, logs, given = tmp_path / "out", tmp_path / "broken.py", io.StringIO(), []
    module.write_text(BROKEN)

    def map_array(job, runs):
        given.append([cell.name for cell in runs])
        with contextlib.redirect_stderr(logs):
            for cell in runs:
                own, its = pickle.loads(pickle.dumps((job, cell)))
                assert own(its) is None
        ended = {"done": lambda: True, "exception": lambda: None}
        return [SimpleNamespace(job_id=f"7_{n}", **ended) for n in range(len(runs))]

    monkeypatch.setattr(slurm, "check", lambda: None)
    monkeypatch.setattr(slurm, "executor", lambda *_: SimpleNamespace(map_array=map_array))
    own = ["--updates", "2", "--rpe-module", str(module), "--launcher", "slurm"]
    first = run_here(*command(corpus, out, "alibi broken", *own), ok=False)
    errors = [line for line in first.stderr.splitlines() if line.startswith("error: ")]
    assert first.returncode == 1 and len(errors) == 1
    assert "broken-seed1 is not finished, training is left: " in errors[0] and "this encoding is broken" in errors[0]
    assert "Traceback" not in first.stderr and "of alibi-seed1, broken-seed1\n" in first.stderr
    assert "error: broken-seed1 failed while training: " in logs.getvalue()
    assert [row["length"] for row in files.read_json_lines(out / "runs/alibi-seed1/eval.jsonl")] == [32, 64]
    # nothing is done twice: only the run that failed is submitted again
    last = out / "runs/alibi-seed1/checkpoints/checkpoint_last.pt"
    before = last.stat().st_mtime_ns
    again = run_here(*command(corpus, out, "alibi broken", *own), ok=False)
    assert again.returncode == 1 and given == [["alibi-seed1", "broken-seed1"], ["broken-seed1"]]
    assert last.stat().st_mtime_ns == before
    # of a finished sweep the table alone is shown
    assert "| alibi" in run_here(*command(corpus, out, "alibi", *own)).stdout and len(given) == 2


@pytest.mark.release
def test_a_job_runs_on_this_machine_too(corpus, tmp_path):
    """The same job by submitit's local executor, without any SLURM."""
    submitit = pytest.importorskip("submitit", reason="needs the extra slurm")
    _, [cell] = resolve_sweep(*command(corpus, tmp_path / "out", "nope", "--updates", "4")[1:])
    [job] = submitit.LocalExecutor(tmp_path / "jobs" / "%j").map_array(slurm.Job(), [cell])
    assert job.result() is None and cell.work_left() == []
    assert [row["length"] for row in files.read_json_lines(cell.folder.results)] == [32, 64]
