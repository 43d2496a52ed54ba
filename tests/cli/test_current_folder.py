"""Modules that lie in the current folder: no command and no process that it starts imports them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_slurm
import pytest
from conftest import PACKAGE, run, run_here

from fairseq_rpe.runs import processes
from fairseq_rpe.utils import child_processes, devices

SCRIPTS = PACKAGE.parent / "scripts"
# of the standard library and of what is installed: whatever starts first imports some of them
SHADOWED = ("argparse", "contextlib", "fairseq", "json", "logging", "multiprocessing", "numpy", "pickle", "random")
SHADOWED += ("re", "runpy", "shutil", "signal", "socket", "submitit", "subprocess", "tempfile", "torch", "typing")
# like the console script: its own folder is on the path, the current one is not
START = "import sys\nfrom fairseq_rpe.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
MINE = """
from fairseq_rpe.encodings import DistanceBias, register

@register("mine")
class Mine(DistanceBias):
    \"\"\"Falls with the distance.\"\"\"

    formula = "-d"
    paper = ""

    def bias(self, d):
        return -d.expand(self.heads, -1)
"""
TRAINING = ("--rpe-module", "mine.py", "--tokens", "32", "--batch-sentences", "4", "--updates", "2", "--device", "cpu")
SMALL = ("--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64", "--disable-validation")


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Path:
    """The current folder, in which a module writes its name into ``imported`` when it is imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in SHADOWED:
        lines = f"with open({str(tmp_path / 'imported')!r}, 'a') as file:\n    file.write(__name__ + '\\n')\n"
        (folder / f"{name}.py").write_text(lines)
    (tmp_path / "start.py").write_text(START)
    (tmp_path / "imported").touch()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def imported(folder: Path) -> str:
    """The names of the modules of the current folder that were imported."""
    return (folder.parent / "imported").read_text()


def start(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess:
    return run(sys.executable, folder.parent / "start.py", *words, env={**os.environ, **environment})


def test_the_sentinels_are_imported_where_the_path_is_not_safe(hostile):
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    assert imported(hostile) == "json\n"


@pytest.mark.release
def test_training_in_a_process_of_its_own(hostile, corpus):
    """The user's own module is loaded there too, and named by the list."""
    (hostile / "mine.py").write_text(MINE)
    run_here("train", corpus, "--rpe", "mine", *TRAINING, "--out", "out", *SMALL, processes=True)
    assert (hostile / "out/checkpoint_last.pt").exists() and imported(hostile) == ""
    assert "mine" in run_here("list", "--names", "--rpe-module", "mine.py").stdout.split()


@pytest.mark.release
def test_torchrun_sweeps_slurm_jobs_and_extend(hostile, corpus, tmp_path):
    pytest.importorskip("submitit", reason="needs the extra slurm")
    (hostile / "mine.py").write_text(MINE)
    start(hostile, "train", corpus, "--rpe", "mine", *TRAINING, "--nproc", "2", "--out", "two", *SMALL)
    sweep = ("sweep", corpus, "--encodings", "mine", "--lengths", "64", *TRAINING)
    start(hostile, *sweep, "--out", "out", *SMALL)
    slurm = fake_slurm.install(tmp_path / "programs")
    start(hostile, *sweep, "--out", "queued", "--launcher", "slurm", *SMALL, **slurm)
    last = "out/runs/mine-seed1/checkpoints/checkpoint_last.pt"
    extend = ["extend", last, corpus, "--tokens", "64", "--updates", "2", "--out", "longer", "--rpe-module", "mine.py"]
    start(hostile, *extend, "--device", "cpu", "--batch-sentences", "2")
    assert (hostile / "two/checkpoint_last.pt").exists()
    assert all((hostile / name / "results.csv").exists() for name in ("out", "queued", "longer"))
    assert imported(hostile) == ""


def test_two_modules_alone_name_the_interpreter():
    """Every other Python process starts with a command of ``child_processes``, whose import path is safe."""
    code = {path: re.sub("#.*", "", path.read_text()) for path in PACKAGE.rglob("*.py")}
    naming = {path.relative_to(PACKAGE).as_posix() for path, text in code.items() if "sys.executable" in text}
    assert naming == {"utils/child_processes.py", "utils/devices.py"}


def test_workers_of_prepare(hostile, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / f"texts/{number}.txt").write_text(f"the {number}th text\n" * 20)
    start(hostile, "prepare", tmp_path / "texts", "--out", "made", "--tokenizer", "words", "--workers", "2")
    assert (hostile / "made/corpus.json").exists() and imported(hostile) == ""


def test_the_question_for_gpus(hostile, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/torch.py").write_text("class cuda:\n    is_available = bool\n")  # starts at once
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(devices, "_DRIVERS", (str(hostile),))
    devices.gpu_names.cache_clear()
    assert devices.gpu_names() == ()
    devices.gpu_names.cache_clear()
    assert imported(hostile) == ""


def test_what_libraries_start_meanwhile_and_every_child_of_a_program(hostile, monkeypatch):
    """As torch's compiler does in a process that a command runs in; afterwards the environment is as it was."""
    command = [sys.executable, "-c", "import json"]
    monkeypatch.setattr("fairseq_rpe.cli.list.run_user_dir", lambda args: subprocess.run(command, check=True) and None)
    run_here("user-dir")
    assert imported(hostile) == "" and "PYTHONSAFEPATH" not in os.environ
    words = [sys.executable, "-c", "import json, subprocess, sys; subprocess.run([sys.executable, '-c', 'import re'])"]
    assert processes.wait(processes.spawn(words, {})) == 0
    assert imported(hostile) == ""


def test_pythonpath_of_the_user_stays_in_force(hostile, tmp_path):
    (tmp_path / "of_the_user.py").write_text("print('loaded')")
    environment = {**os.environ, **child_processes.SAFE_PATH, "PYTHONPATH": str(tmp_path)}
    assert run(*child_processes.python_command(), "-m", "of_the_user", env=environment).stdout == "loaded\n"


def test_children_use_the_package_of_their_parent_wherever_it_lies(hostile, tmp_path):
    """The parent has another copy of the package, by its own program alone; its child runs that, without its folder."""
    copy, program = tmp_path / "checkout", tmp_path / "program.py"
    shutil.copytree(PACKAGE, copy / "fairseq_rpe", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(hostile / "json.py", copy)
    program.write_text(
        f"import json, subprocess, sys\nsys.path.insert(0, {str(copy)!r})\n"
        "from fairseq_rpe.utils.child_processes import module_command\n"
        "subprocess.run(module_command('fairseq_rpe.cli.main', 'user-dir'), check=True)"
    )
    assert run(sys.executable, program).stdout == f"{copy}/fairseq_rpe\n"
    words = ["-P", copy / "fairseq_rpe/utils/run_module.py", "-u", "-m", "fairseq_rpe.cli.main", "user-dir"]
    assert run(sys.executable, *words).stdout == f"{copy}/fairseq_rpe\n"
    assert imported(hostile) == ""


def test_scripts_start_python_with_a_safe_path():
    """Those that stay in the user's folder, or use the environment of the repository; set-up goes to the latter."""
    started = re.compile(r"python\"? (-P )?-[cm] ")
    for script in SCRIPTS.glob("*.sh"):
        text = script.read_text()
        if script.stem != "setup" and "export PYTHONSAFEPATH=1" not in text:
            assert all(match[1] for match in started.finditer(text)), script
    setup = (SCRIPTS / "setup.sh").read_text()
    assert setup.index('\ncd "$root"\n') < started.search(setup).start()


def test_the_gpu_report_starts_python_with_a_safe_path(hostile, tmp_path):
    python, log = tmp_path / "python", tmp_path / "seen"
    python.write_text(f'#!/bin/sh\necho "${{PYTHONSAFEPATH-unset}}" >>{log}\n')
    python.chmod(0o755)
    report = (SCRIPTS / "gpu_report.sh", "--small", "--device", "cpu", "--out", tmp_path / "report")
    run(*report, env={**os.environ, "PYTHON": str(python)})
    assert set(log.read_text().split()) == {"1"}
