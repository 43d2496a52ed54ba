"""The shell scripts: help, any working directory, set-up that can be interrupted, arguments passed on whole."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
KNOWN = ("wikitext103", "books", "github", "wikibook", "c4", "arxiv", "openwebtext2")
THIN = {name: f"[{name}]" for name in ("train", "eval", "sweep", "report", "sensitivity", "sliding")}
THIN |= {"prepare_text": "[prepare]", **{f"prepare_{name}": f"[prepare-corpus][{name}]" for name in KNOWN}}

# Stands for Python: answers what set-up asks, makes a pretended environment, and notes every pip call.
FAKE_PYTHON = r"""#!/usr/bin/env bash
set -e
case "$1" in
    -c) echo "${FAKE_VERSION:-3.11.7}" ;;
    --version) echo "Python ${FAKE_VERSION:-3.11.7}" ;;
    -m)
        if [[ "$2" == venv ]]; then
            mkdir -p "$3/bin"
            echo "venv $3" >>"$FAKE_LOG"
            echo "version = ${FAKE_VERSION:-3.11.7}" >"$3/pyvenv.cfg"
            cp "$0" "$3/bin/python"
        else
            echo "$*" >>"$FAKE_LOG"
            if [[ -n "${FAKE_FAIL:-}" && "$*" == *"$FAKE_FAIL"* ]]; then exit 7; fi
            printf '#!/usr/bin/env bash\nprintf "[%%s]" "$@"\n' >"$(dirname "$0")/fairseq-rpe"
            chmod +x "$(dirname "$0")/fairseq-rpe"
        fi
        ;;
esac
"""


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A copy of what set-up reads, under a path with a blank, with a pretended Python."""
    root = tmp_path / "a project"
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls"))
    return root


def call(*command: object, cwd: Path = Path("/"), **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def calls(root: Path) -> list[str]:
    """The noted calls since the last look."""
    log = root.parent / "calls"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_every_script_is_executable_and_stops_at_an_error():
    """scripts/test.sh has shellcheck read them."""
    assert {"setup", "test", "quickstart", "docs", "prepare_stdlib", *THIN} <= {path.stem for path in SCRIPTS}
    for script in [*SCRIPTS, ROOT / ".ci/run"]:
        assert script.stat().st_mode & stat.S_IXUSR, script
        assert re.match("#!/usr/bin/env bash\n(.*\n)*?set -euo pipefail\n", script.read_text()), script


def test_help_does_nothing_else(copy):
    for name in ("setup", "test", "quickstart", "docs"):
        done = call(copy / "scripts" / f"{name}.sh", "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: scripts/{name}.sh")
    assert calls(copy) == [] and not (copy / ".venv").exists()


def test_setup_installs_pinned_things_in_order_once(copy):
    done = call(copy / "scripts/setup.sh")
    assert done.returncode == 0, done.stderr
    venv, torch, fairseq, rest = calls(copy)
    assert venv == f"venv {copy}/.venv"
    assert torch.endswith("-c requirements/constraints.txt torch")
    assert fairseq.endswith("--require-hashes --no-deps -r requirements/fairseq.txt")
    assert rest.endswith("-c requirements/constraints.txt -e .[test]")
    assert all(" install -qq " in one for one in (torch, fairseq, rest))
    assert done.stderr.startswith(f"setting up {copy}/.venv, once") and done.stderr.count("\n") == 1
    assert done.stdout == f"{copy}/.venv is ready\n"

    assert call(copy / "scripts/setup.sh", "--quiet").stdout == ""
    assert calls(copy) == []
    for flag in ("--quiet", "--verbose"):
        with open(copy / "requirements/constraints.txt", "a") as file:
            file.write("# changed\n")
        done = call(copy / "scripts/setup.sh", flag)
        again = calls(copy)
        assert done.returncode == 0 and len(again) == 3  # installed again, the environment itself is kept
        if flag == "--quiet":
            assert done.stderr.count("\n") == 1 and "ready" not in done.stdout
        else:
            assert "installing fairseq\n" in done.stdout and not any("-qq" in one for one in again)


def test_interrupted_setup_is_redone_from_the_start(copy):
    done = call(copy / "scripts/setup.sh", FAKE_FAIL="fairseq.txt")
    assert done.returncode == 7
    assert len(calls(copy)) == 3 and not (copy / ".venv/stamp").exists()
    (copy / ".venv/half").write_text("")
    assert call(copy / "scripts/setup.sh").returncode == 0
    assert len(calls(copy)) == 4 and not (copy / ".venv/half").exists()


def test_moved_project_and_other_python_get_a_new_environment(copy):
    assert call(copy / "scripts/setup.sh").returncode == 0
    moved = copy.rename(copy.parent / "moved")
    calls(moved)
    for version in ("3.11.7", "3.12.1"):
        assert call(moved / "scripts/setup.sh", FAKE_VERSION=version).returncode == 0
        assert calls(moved)[0] == f"venv {moved}/.venv"


def test_setup_without_a_usable_python_or_platform_is_one_line(copy, tmp_path):
    (tmp_path / "bin").mkdir()
    uname = tmp_path / "bin/uname"
    uname.write_text('#!/usr/bin/env bash\nif [[ "$1" == -s ]]; then echo Darwin; else echo arm64; fi\n')
    uname.chmod(0o755)
    for environment, culprit in (
        ({"PYTHON": "/bin/false"}, "PYTHON=/bin/false does not run"),
        ({"PYTHON": "/no/such/python"}, "PYTHON=/no/such/python does not run"),
        ({"FAKE_VERSION": "3.9.1"}, r"PYTHON=.* is Python 3\.9\.1, .* Linux x86_64 with Python 3\.11 or 3\.12 only"),
        ({"FAKE_VERSION": "3.13.0"}, r"PYTHON=.* is Python 3\.13\.0, .* pip install \."),
        ({"PATH": f"{uname.parent}:{os.environ['PATH']}"}, r"this is Darwin arm64, .* Linux x86_64 .* pip install \."),
    ):
        done = call(copy / "scripts/setup.sh", **environment)
        assert done.returncode == 1 and not (copy / ".venv").exists() and calls(copy) == []
        assert re.fullmatch(f"error: {culprit}.*\n", done.stderr), done.stderr
    done = call(copy / "scripts/setup.sh", "--fast")
    assert done.returncode == 2 and "unknown argument '--fast'" in done.stderr


def test_thin_scripts_pass_every_argument_on(copy):
    for name, command in THIN.items():
        done = call(copy / "scripts" / f"{name}.sh", "a b", "", "--x=*", "--", "-y")
        assert done.stdout == f"{command}[a b][][--x=*][--][-y]", done.stderr
    done = call(copy / "scripts/prepare_wikitext103.sh", "--words", "--from", "x")
    assert done.stdout == "[prepare-corpus][wikitext103-words][--from][x]", done.stderr


def test_quickstart_prepares_then_sweeps(copy):
    done = call(copy / "scripts/quickstart.sh", "--jobs", "1")
    assert done.returncode == 0 and "[prepare-stdlib]" in done.stdout, done.stderr
    swept, _, after = done.stdout[done.stdout.index("[sweep]") :].partition("What next:\n")
    for word in (f"{copy}/data-bin/stdlib", "sinusoidal alibi type1 inv_n", "64,128,256,512,768,1152", "--jobs][1"):
        assert f"[{word}]" in swept
    assert len(after.splitlines()) == 3 and f"--logdir '{copy}/runs/quickstart/tensorboard'" in after
    assert f"figures --sweep '{copy}/runs/quickstart'" in after and "quickstart.sh' --encodings" in after
    elsewhere = call(copy / "scripts/quickstart.sh", "--out", "a b").stdout
    assert "--logdir 'a b/tensorboard'" in elsewhere and "figures --sweep 'a b'" in elsewhere


def test_every_requirement_is_pinned_and_torch_is_no_cuda_default():
    pins = (ROOT / "requirements/constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9A-Za-z.]+)", line) for line in pins if not line.startswith("#")]
    names = {pin[1].lower().replace("_", "-"): pin[2] for pin in found}
    assert names["torch"] == "2.13.0" and names["torchaudio"] == "2.11.0" and names["ve-fairseq"] == "0.12.3"
    assert set(re.findall(r'"([a-z-]+)[>=]=[^"]+"', (ROOT / "setup.py").read_text())) <= names.keys()
    assert len(set(re.findall(r"sha256:[0-9a-f]{64}\b", (ROOT / "requirements/fairseq.txt").read_text()))) == 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["requires"] == ["setuptools>=68"]
