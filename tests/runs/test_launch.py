"""One run in several processes and on several nodes: torchrun on this machine, real training on processors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import run, run_here

from fairseq_rpe.cli.main import main
from fairseq_rpe.core import devices, files
from fairseq_rpe.runs import checkpoints, launch
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.runs.settings import Request, plan
from fairseq_rpe.sweeps.local import places

PROGRAM = [sys.executable, "-m", "fairseq_rpe.cli.main"]
SMALL = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64", "--disable-validation"]
RUN = ["--rpe", "kerple_log", "--tokens", "32", "--batch-sentences", "4", "--device", "cpu", "--warmup", "1"]
SLURM_VARIABLES = ("SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in (*SLURM_VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(CheckpointFolder(folder).last)["model"]


def assert_same_model(a: Path, b: Path) -> None:
    first, second = parameters(a), parameters(b)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6, msg=name)


def processes_about(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def on_nodes(corpus: Path, folder: Path, updates: int, *more: str) -> list[subprocess.Popen]:
    """Start a run on two nodes, the second one first."""
    port = 20000 + os.getpid() % 10000
    command = [*PROGRAM, "train", str(corpus), *RUN, "--updates", str(updates), "--save-dir", str(folder), *more]
    command += ["--nodes", "2", "--master", f"localhost:{port}", "--node-rank"]
    logs = [folder.parent / f"node{rank}.log" for rank in (1, 0)]
    return [
        subprocess.Popen([*command, str(rank), *SMALL], stdout=open(log, "w"), stderr=subprocess.STDOUT)
        for rank, log in zip((1, 0), logs, strict=True)
    ]


def test_two_nodes_equal_one_process_even_after_one_is_lost(corpus, tmp_path):
    """Two batches accumulated by one process; a node killed outright ends the other, and the same commands go on."""
    folder = tmp_path / "two"
    second, first = on_nodes(corpus, folder, 100000, "--save-every", "4")
    try:
        deadline = time.monotonic() + 120
        while not CheckpointFolder(folder).last.exists() and time.monotonic() < deadline:
            assert first.poll() is None, (tmp_path / "node0.log").read_text()[-2000:]
            time.sleep(0.02)
        second.kill()
        assert first.wait(60) == 2
        second.wait()
    finally:
        for node in (first, second):
            node.kill()
    assert "error: fairseq-train failed: " in (tmp_path / "node0.log").read_text()
    done = checkpoints.newest(CheckpointFolder(folder))[0]
    end = done + 4
    nodes = on_nodes(corpus, folder, end, "--save-every", "4")
    assert [node.wait(120) for node in nodes] == [0, 0], (tmp_path / "node0.log").read_text()[-2000:]
    assert files.read_json(folder / "run.json")["finished"]["updates"] == end
    assert files.read_json(folder / "run.json")["settings"]["nproc"] == 2
    starts = files.read_json(folder / "environment.json")["starts"]
    assert [start["from_update"] for start in starts] == [0, done]  # noted by the first node alone
    assert f"@ {done} updates" in (folder / "train.log").read_text() or done == 0
    told = (tmp_path / "node1.log").read_text()
    assert f"node 1 of 2 has joined, its messages: {folder}/train-node1.log" in told and "INFO" not in told
    one = tmp_path / "one"
    run_here("train", corpus, *RUN, "--updates", end, "--update-freq", 2, "--save-dir", one, *SMALL)
    assert_same_model(one, folder)


def test_killed_torchrun_takes_its_processes_along(corpus, tmp_path):
    """SIGKILL of the command ends torchrun and every process of it; rerunning resumes."""
    folder = tmp_path / "run"
    command = ["train", str(corpus), *RUN, "--save-dir", str(folder), "--save-every", "4", "--nproc", "2"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([*PROGRAM, *command, "--updates", "100000", *SMALL], stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not CheckpointFolder(folder).last.exists() and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.02)
        assert len(processes_about(f"--save-dir\0{folder}")) == 4  # the command, torchrun and two ranks
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while left := processes_about(f"--save-dir\0{folder}"):
        assert time.monotonic() < deadline, f"processes {left} outlived their parent"
        time.sleep(0.1)
    done = checkpoints.newest(CheckpointFolder(folder))[0]
    assert done > 0
    run_here(*command, "--updates", str(done + 4), *SMALL)
    assert f"@ {done} updates" in (folder / "train.log").read_text()
    assert files.read_json(folder / "run.json")["finished"]["updates"] == done + 4


def test_an_interrupted_torchrun_is_told(corpus, tmp_path):
    folder = tmp_path / "run"
    command = ["train", str(corpus), *RUN, "--save-dir", str(folder), "--save-every", "4", "--nproc", "2"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([*PROGRAM, *command, "--updates", "100000", *SMALL], stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not CheckpointFolder(folder).last.exists() and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 143
    assert "stopped by SIGTERM; rerun the same command to resume" in (tmp_path / "log").read_text()
    assert not processes_about(f"--save-dir\0{folder}")


def error_of(capsys, *argv: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_nodes_that_do_not_fit_are_refused_in_one_line(corpus, tmp_path, capsys, monkeypatch):
    def refused(*more: object) -> str:
        return error_of(capsys, "train", corpus, *RUN, "--save-dir", tmp_path / "run", *more)

    assert "give --nodes too" in refused("--node-rank", 0)
    assert "give --nodes too" in refused("--master", "host:1")
    assert "with --node-rank 0 to 1" in refused("--nodes", 2, "--master", "host:1")
    assert "are numbered 0 to 1" in refused("--nodes", 2, "--node-rank", 2, "--master", "host:1")
    assert "with --master HOST:PORT" in refused("--nodes", 2, "--node-rank", 1)
    monkeypatch.setenv("SLURM_NNODES", "3")
    assert "this SLURM job has 3" in refused("--nodes", 2, "--node-rank", 1)
    assert not (tmp_path / "run").exists()
    for address in ("host", "host:", ":1", "host:0", "host:x", "host:70000"):
        assert "is not HOST:PORT" in refused("--nodes", 2, "--master", address)


def test_torchrun_is_printed(corpus, tmp_path, capsys):
    command = ["train", str(corpus), *RUN, "--save-dir", str(tmp_path / "run"), "--dry-run", "--nproc", "4"]
    assert main([*command, "--nodes", "2", "--node-rank", "1", "--master", "gpu01:29500"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    flags = "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr gpu01 --master-port 29500"
    assert f"-m torch.distributed.run {flags} -m fairseq_rpe.runs.launch {corpus} " in line
    assert "--cpu --distributed-backend gloo --ddp-backend legacy_ddp --distributed-world-size 8" in line
    on_gpus = [word if word != "cpu" else "cuda" for word in command]
    assert main(on_gpus) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert "--nproc-per-node 4 --standalone -m fairseq_rpe.runs.launch " in line and "--cpu" not in line
    assert "gloo" not in line and "--ddp-backend" not in line and "--distributed-world-size 4" in line
    assert not (tmp_path / "run").exists()


ASKED = Request(rpe="alibi", save_dir=Path("x"), data=Path("data"))


def test_slurm_says_which_node_this_is(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="needs the extra slurm")
    asked = replace(ASKED, nodes=2)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[7-8]" ] && printf "n7\\nn8\\n"\n')
    scontrol.chmod(0o755)
    for name, value in zip(SLURM_VARIABLES, ("2", "1", "123456", "n[7-8]"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    node = launch.here(asked)
    assert (node.rank, node.master, node.first) == ("1", "n7:23456", False)
    # the line that a dry run shows comes to the same
    wanted = launch.in_slurm(asked)
    shown = run("bash", "-c", f"echo {launch.shown([wanted.rank, *wanted.master.rsplit(':', 1)])}").stdout
    assert shown.split() == ["1", "n7", "23456"]


def with_gpus(monkeypatch, number: int) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: tuple(f"GPU {n}" for n in range(number)))


def test_more_processes_than_gpus_are_refused(monkeypatch):
    with_gpus(monkeypatch, 2)
    asked = replace(ASKED, nproc=4)
    with pytest.raises(files.UserError, match="--nproc 4: there are 2 GPUs here"):
        launch.gpus(asked)
    assert launch.gpus(replace(asked, nproc=2)) == 2
    with_gpus(monkeypatch, 0)
    assert launch.gpus(asked) == 0
    with pytest.raises(files.UserError, match="no GPU is visible here"):
        launch.gpus(replace(asked, device="cuda"))


def test_a_torch_that_cannot_be_imported_is_no_gpu(monkeypatch, tmp_path):
    """The number of GPUs is not an exit status: a failing torch is told, and is not one GPU."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda is broken')")
    monkeypatch.setattr(devices, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    devices.gpus.cache_clear()
    with pytest.raises(files.UserError, match="torch cannot report its GPUs .ImportError: libcuda is broken"):
        devices.gpus()
    (tmp_path / "torch.py").write_text(
        "class cuda:\n"
        "    is_available = staticmethod(lambda: True)\n"
        "    device_count = staticmethod(lambda: 2)\n"
        "    get_device_name = staticmethod(lambda i: f'GPU {i}')\n"
    )
    assert devices.gpus() == ("GPU 0", "GPU 1")
    monkeypatch.setattr(devices, "_DRIVERS", ())
    devices.gpus.cache_clear()
    assert devices.gpus() == () or sys.platform != "linux"
    devices.gpus.cache_clear()


def test_places_share_cores_and_gpus(monkeypatch):
    def seen(*of: object) -> list[str]:
        return [place["CUDA_VISIBLE_DEVICES"] for place in places(*of)]

    monkeypatch.setattr("fairseq_rpe.runs.processes.cores", lambda: 8)
    assert places("cpu", 1, 3) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert places("cpu", 1, None) == [{"OMP_NUM_THREADS": "1"}] * 8
    assert places("cpu", 16, None) == [{"OMP_NUM_THREADS": "1"}]
    with_gpus(monkeypatch, 0)
    assert places("auto", 4, None) == [{"OMP_NUM_THREADS": "1"}] * 2
    with pytest.raises(files.UserError, match="no GPU is visible here"):
        places("cuda", 1, None)
    with_gpus(monkeypatch, 4)
    assert seen("auto", 2, None) == ["0,1", "2,3"]
    assert seen("auto", 3, None) == ["0,1,2"]
    assert seen("auto", 1, 6) == ["0", "1", "2", "3", "0", "1"]  # more runs than GPUs share them
    with pytest.raises(files.UserError, match="--nproc 5: there are 4 GPUs here"):
        places("auto", 5, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,11,9")
    assert seen("auto", 2, None) == ["5,6", "11,9"]
    with_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2a, MIG-1c")
    assert seen("auto", 1, None) == ["GPU-8f2a", "MIG-1c"]
    assert not re.search(" ", "".join(seen("auto", 2, 1)))


def test_malloc_keeps_memory_on_a_cpu(monkeypatch, tmp_path):
    """The trainer gets it, unless the user has settings of their own or trains on GPUs."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown = f"import os, pathlib; pathlib.Path({str(tmp_path / 'seen')!r}).write_text(repr(dict(os.environ)))"
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", shown])
    asked = replace(ASKED, device="cpu")
    assert launch.launch(asked, plan(asked, ""), launch.Node(), []).code == 0
    seen = (tmp_path / "seen").read_text()
    for name, value in (("OMP_NUM_THREADS", "1"), ("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "5")):
        assert f"'{name}': '{value}'" in seen
    assert launch.keep_memory(1) == {}


@pytest.mark.parametrize(("given", "expected"), [({}, "5000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None")])
def test_threads_of_every_command_wait_briefly(given, expected):
    """Said before torch is loaded, which reads it once; what the user set stays."""
    code = """
import os, sys
from fairseq_rpe.runs import processes
processes.wait_briefly = lambda real=processes.wait_briefly: print("torch" in sys.modules, real())
from fairseq_rpe.cli.main import main
main(["user-dir"])
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "False None" and done.stdout.splitlines()[-1] == expected
