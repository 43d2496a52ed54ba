"""One run in several processes and on several nodes: torchrun on this machine, real training on processors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import PROGRAM, run, run_here
from live_processes import HELD_ENCODING, begin, processes_about, wait_for
from refusal import refusal
from sweep_commands import SMALL

from fairseq_rpe.runs import checkpoints, launch, processes
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.runs.settings import make_plan
from fairseq_rpe.runs.training_config import TrainingConfig
from fairseq_rpe.sweeps.local_executor import job_environments
from fairseq_rpe.utils import devices, files, json_files

RUN = ["--tokens", "32", "--batch-sentences", "4", "--device", "cpu", "--warmup", "1"]
QUIET = [*SMALL, "--disable-validation"]
SLURM_VARIABLES = ("SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
ASKED = TrainingConfig(rpe="alibi", out=Path("x"), data=Path("data"))
FREQUENCY, SAVED, UPDATES, LARGEST = 2, 2, 3, 200


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in (*SLURM_VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> list[str]:
    """The options of a training by ``held_encoding`` at random positions, which it notes."""
    module = shutil.copy(HELD_ENCODING, tmp_path_factory.mktemp("held"))
    own = ["--rpe", "held", "--rpe-module", module, "--positions-train", f"randomized:max_position={LARGEST}"]
    return [*RUN, "--save-every", str(SAVED), *own]


def assert_same_model(a: Path, b: Path) -> None:
    first, second = (torch.load(CheckpointFolder(folder).last)["model"] for folder in (a, b))
    assert first.keys() == second.keys()
    # a bias of all keys moves the scores of a query alike, so that its gradient is rounding alone
    for name in (name for name in first if not name.endswith("k_proj.bias")):
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6, msg=name)


def notes(folder: Path, rank: int = 0) -> list[dict]:
    """What a process noted of its training batches, and at its end."""
    path = folder / f"rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.release)])
def test_two_processes_equal_one_even_if_they_are_killed_and_resumed(corpus, held, tmp_path, monkeypatch, killed):
    """SIGKILL of the command ends torchrun and both ranks; the same command goes on from the last checkpoint.

    Each rank draws its own random positions, and the resumed ones those that the killed ones drew.
    """
    folder, seen = tmp_path / "two", tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv("HELD_NOTES", str(seen))
    train = ["train", str(corpus), *held, "--updates", str(UPDATES)]
    command = [*PROGRAM, *train, "--update-freq", str(FREQUENCY), "--out", str(folder), "--nproc", "2", *QUIET]
    begun = FREQUENCY * SAVED + 1
    if killed:
        (seen / "hold").write_text(str(begun - 1))
        with begin(command, tmp_path / "log") as process:
            wait_for(lambda: [len(notes(seen, rank)) for rank in (0, 1)] == [begun, begun], process, tmp_path / "log")
            assert len(processes_about(f"\0{folder}\0")) == 4  # the command, torchrun and two ranks
        wait_for(lambda: not processes_about(f"\0{folder}\0"))
        (seen / "hold").unlink()
    run_here(*command[len(PROGRAM) :], processes=True)
    log = (folder / "train.log").read_text()
    assert bool(re.search(rf"Loaded checkpoint .* @ {SAVED} updates", log)) == killed
    assert json_files.read_json(folder / "run.json")["finished"]["updates"] == UPDATES

    drawn = {}
    for rank in (0, 1):
        *batches, end = notes(seen, rank)
        # its threads can abort a process that ends beside them
        assert end["grouped"] is False, "the process group was left to itself"
        assert len({batch["process"] for batch in batches}) == 1 + killed  # the killed one and the resumed one
        rows = [row for batch in batches for row in batch["positions"]]
        assert all(len(row) == 32 and row == sorted(set(row)) and 0 <= row[0] and row[-1] < LARGEST for row in rows)
        if killed:
            assert rows[begun - 1] == rows.pop(begun)  # the batch that was held, and again after the last checkpoint
        drawn[rank] = rows
        assert len(drawn[rank]) == FREQUENCY * UPDATES
    both = drawn[0] + drawn[1]
    assert all(a != b for i, a in enumerate(both) for b in both[:i])
    scales = [[batch["scale"] for batch in notes(seen, rank)[:-1]] for rank in (0, 1)]
    assert scales[0] == scales[1] and len(set(scales[0])) == UPDATES  # one value for each update

    # one process that accumulates the batches of both has the same model; all blocks are equally long, so that it draws
    # as rank 0 does, for as many batches
    (tmp_path / "one").mkdir()
    monkeypatch.setenv("HELD_NOTES", str(tmp_path / "one"))
    run_here(*train, "--update-freq", 2 * FREQUENCY, "--out", tmp_path / "one/run", *QUIET)
    alone = [batch["positions"][0] for batch in notes(tmp_path / "one")]
    assert [row for n, row in enumerate(alone) if n % (2 * FREQUENCY) < FREQUENCY] == drawn[0]
    assert_same_model(tmp_path / "one/run", folder)


def test_a_stopped_training_ends_its_child_and_is_told(corpus, tmp_path, monkeypatch):
    children = []

    def spawn(*given: object, real=processes.spawn, **options: object):
        """Start the child; SIGTERM arrives as soon as its end is waited for."""
        child = real(*given, **options)
        wait = child.wait
        monkeypatch.setattr(child, "wait", lambda *timeout: wait(*timeout) if timeout else os.kill(os.getpid(), 15))
        children.append(child)
        return child

    monkeypatch.setattr(processes, "spawn", spawn)
    monkeypatch.setattr(launch, "training_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    train = ["train", corpus, "--rpe", "alibi", *RUN, "--out", tmp_path / "run"]
    done = run_here(*train, ok=False, processes=True)
    assert done.returncode == 143 and "stopped by SIGTERM; rerun the same command to resume" in done.stderr
    assert [child.poll() for child in children] == [-signal.SIGTERM]


@pytest.mark.release
def test_an_interrupted_torchrun_is_told(corpus, held, tmp_path, monkeypatch):
    folder, seen = tmp_path / "run", tmp_path / "seen"
    seen.mkdir()
    (seen / "hold").write_text("1")
    monkeypatch.setenv("HELD_NOTES", str(seen))
    command = [*PROGRAM, "train", str(corpus), *held, "--out", str(folder), "--nproc", "2", *QUIET]
    with begin(command, tmp_path / "log") as process:
        wait_for(lambda: notes(seen, 0) and notes(seen, 1), process, tmp_path / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert "stopped by SIGTERM; rerun the same command to resume" in (tmp_path / "log").read_text()
    assert not processes_about(f"\0{folder}\0")


def on_nodes(corpus: Path, folder: Path, updates: int, *more: str) -> list[subprocess.Popen]:
    """Start a run on two nodes, the second one first."""
    port, given = 20000 + os.getpid() % 10000, ["--updates", str(updates), "--out", str(folder), *more]
    command = [*PROGRAM, "train", str(corpus), "--rpe", "kerple_log", *RUN, *given]
    command += ["--nodes", "2", "--master", f"localhost:{port}", "--node-rank"]
    logs = {rank: open(folder.parent / f"node{rank}.log", "w") for rank in ("1", "0")}
    words = {rank: [*command, rank, *QUIET] for rank in logs}
    return [subprocess.Popen(words[rank], stdout=log, stderr=subprocess.STDOUT) for rank, log in logs.items()]


@pytest.mark.release
def test_two_nodes_equal_one_process_even_after_one_is_lost(corpus, tmp_path):
    """Two batches accumulated by one process; a node killed outright ends the other, and the same commands go on."""
    folder = tmp_path / "two"
    second, first = on_nodes(corpus, folder, 100000, "--save-every", "4")
    try:
        wait_for(CheckpointFolder(folder).last.exists, first, tmp_path / "node0.log")
        second.kill()
        assert first.wait(60) == 2
        second.wait()
    finally:
        for node in (first, second):
            node.kill()
    assert "error: fairseq-train failed: " in (tmp_path / "node0.log").read_text()
    done = checkpoints.find_newest(CheckpointFolder(folder))[0]
    end = done + 4
    nodes = on_nodes(corpus, folder, end, "--save-every", "4")
    assert [node.wait(120) for node in nodes] == [0, 0], (tmp_path / "node0.log").read_text()[-2000:]
    assert json_files.read_json(folder / "run.json")["finished"]["updates"] == end
    assert json_files.read_json(folder / "run.json")["settings"]["nproc"] == 2
    starts = json_files.read_json(folder / "environment.json")["starts"]
    assert [start["from_update"] for start in starts] == [0, done]  # noted by the first node alone
    assert f"@ {done} updates" in (folder / "train.log").read_text() or done == 0
    told = (tmp_path / "node1.log").read_text()
    assert f"node 1 of 2 has joined, its messages: {folder}/train-node1.log" in told and "INFO" not in told
    one = tmp_path / "one"
    alone = ["--rpe", "kerple_log", *RUN, "--updates", end, "--update-freq", 2, "--out", one]
    run_here("train", corpus, *alone, *QUIET)
    assert_same_model(one, folder)


def test_nodes_that_do_not_fit_are_refused_in_one_line(corpus, tmp_path, monkeypatch):
    def refused(more: str) -> str:
        return refusal("train", corpus, "--rpe", "alibi", *RUN, "--out", tmp_path / "run", *more.split())

    for more, words in (
        ("--node-rank 0", "give --nodes too"),
        ("--master host:1", "give --nodes too"),
        ("--nodes 2 --master host:1", "with --node-rank 0 to 1"),
        ("--nodes 2 --node-rank 2 --master host:1", "are numbered 0 to 1"),
        ("--nodes 2 --node-rank 1", "with --master HOST:PORT"),
    ):
        assert words in refused(more)
    monkeypatch.setenv("SLURM_NNODES", "3")
    assert "this SLURM job has 3" in refused("--nodes 2 --node-rank 1")
    assert not (tmp_path / "run").exists()
    for address in ("host", "host:", ":1", "host:0", "host:x", "host:70000"):
        assert "is not HOST:PORT" in refused(f"--nodes 2 --master {address}")


def test_torchrun_is_printed(corpus, tmp_path):
    command = ["train", corpus, "--rpe", "alibi", *RUN, "--out", tmp_path / "run", "--dry-run", "--nproc", 4]
    [line] = run_here(*command, "--nodes", 2, "--node-rank", 1, "--master", "gpu01:29500").stdout.splitlines()
    flags = "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr gpu01 --master-port 29500"
    assert f"-m torch.distributed.run {flags} -m fairseq_rpe.runs.launch {corpus} " in line
    assert "--cpu --distributed-backend gloo --ddp-backend legacy_ddp --distributed-world-size 8" in line
    [line] = run_here(*command, "--device", "cuda").stdout.splitlines()
    assert "--nproc-per-node 4 --standalone -m fairseq_rpe.runs.launch " in line and "--cpu" not in line
    assert "gloo" not in line and "--ddp-backend" not in line and "--distributed-world-size 4" in line
    assert not (tmp_path / "run").exists()


def test_slurm_says_which_node_this_is(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="needs the extra slurm")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[7-8]" ] && printf "n7\\nn8\\n"\n')
    scontrol.chmod(0o755)
    for name, value in zip(SLURM_VARIABLES, ("2", "1", "123456", "n[7-8]"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = replace(ASKED, nodes=2)
    node = launch.current_node(asked)
    assert (node.rank, node.master, node.is_first) == ("1", "n7:23456", False)
    # the line that a dry run shows comes to the same
    wanted = launch.slurm_node(asked)
    shown = run("bash", "-c", f"echo {launch.shell_line([wanted.rank, *wanted.master.rsplit(':', 1)])}").stdout
    assert shown.split() == ["1", "n7", "23456"]


def with_gpus(monkeypatch, number: int) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: tuple(f"GPU {n}" for n in range(number)))


def test_a_torch_that_cannot_be_imported_is_no_gpu(monkeypatch, tmp_path):
    """The number of GPUs is not an exit status: a failing torch is told, and is not one GPU."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda is broken')")
    monkeypatch.setattr(devices, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    devices.gpu_names.cache_clear()
    with pytest.raises(files.UserError, match="torch cannot report its GPUs .ImportError: libcuda is broken"):
        devices.gpu_names()
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n    device_count = staticmethod(lambda: 2)\n"
        "    get_device_name = staticmethod(lambda i: f'GPU {i}')\n"
    )
    assert devices.gpu_names() == ("GPU 0", "GPU 1")
    monkeypatch.setattr(devices, "_DRIVERS", ())
    devices.gpu_names.cache_clear()
    assert devices.gpu_names() == () or sys.platform != "linux"
    devices.gpu_names.cache_clear()


def test_places_share_cores_and_gpus(monkeypatch):
    def seen(*of: object) -> list[str]:
        return [place["CUDA_VISIBLE_DEVICES"] for place in job_environments(*of)]

    monkeypatch.setattr("fairseq_rpe.runs.processes.available_cores", lambda: 8)
    with_gpus(monkeypatch, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert job_environments("cpu", 1, 2) == [{"OMP_NUM_THREADS": "3"}] * 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    for of, threads in ((("cpu", 1, 3), "222"), (("cpu", 1, None), "11111111"), (("cpu", 16, None), "1")):
        assert job_environments(*of) == [{"OMP_NUM_THREADS": number} for number in threads]
    assert (
        job_environments("auto", 4, None) == [{"OMP_NUM_THREADS": "1"}] * 2
        and launch.count_gpus(replace(ASKED, nproc=4)) == 0
    )
    with pytest.raises(files.UserError, match="no GPU is visible here"):
        job_environments("cuda", 1, None)
    with_gpus(monkeypatch, 4)
    assert seen("auto", 2, None) == ["0,1", "2,3"]
    assert seen("auto", 3, None) == ["0,1,2"]
    assert seen("auto", 1, 6) == ["0", "1", "2", "3", "0", "1"]  # more runs than GPUs share them
    assert launch.count_gpus(replace(ASKED, nproc=4)) == 4
    for refuse in (job_environments, lambda *_: launch.count_gpus(replace(ASKED, nproc=5))):
        with pytest.raises(files.UserError, match="--nproc 5: there are 4 GPUs here"):
            refuse("auto", 5, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,11,9")
    assert seen("auto", 2, None) == ["5,6", "11,9"]
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2a, MIG-1c")
    assert seen("auto", 1, None) == ["GPU-8f2a", "MIG-1c"] and " " not in seen("auto", 2, 1)[0]


def test_malloc_keeps_memory_on_a_cpu(monkeypatch, tmp_path):
    """The trainer gets it, unless the user has settings of their own or trains on GPUs."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown = f"import os, pathlib; pathlib.Path({str(tmp_path / 'seen')!r}).write_text(repr(dict(os.environ)))"
    monkeypatch.setattr(launch, "training_command", lambda *_: [sys.executable, "-c", shown])
    asked = replace(ASKED, device="cpu")
    assert launch.launch_training(asked, make_plan(asked, ""), launch.Node(), []).code == 0
    seen = (tmp_path / "seen").read_text()
    for name, value in (("OMP_NUM_THREADS", "1"), ("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "5")):
        assert f"'{name}': '{value}'" in seen
    assert launch.malloc_settings(1) == {}


@pytest.mark.parametrize(("given", "expected"), [({}, "5000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None")])
def test_threads_of_every_command_wait_briefly(given, expected):
    """Said before torch is loaded, which reads it once; what the user set stays."""
    code = """
import os, sys
from fairseq_rpe.runs import processes
processes.shorten_thread_spinning = lambda real=processes.shorten_thread_spinning: print("torch" in sys.modules, real())
from fairseq_rpe.cli.main import main
main(["user-dir"])
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "False None" and done.stdout.splitlines()[-1] == expected
