"""What is published: a source archive with everything in it, and a wheel made from that which works anywhere."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from distutils.core import run_setup
from pathlib import Path

import pytest
from conftest import run

from fairseq_rpe import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fairseq_rpe"
TOP = ("fairseq_rpe", "tests", "scripts", "docs", "requirements", "benchmarks")

# Everything here must be the installed package's own: its data files, its options, what it computes.
OUTSIDE = """
import sys, torch, fairseq_rpe
from importlib.metadata import version
assert fairseq_rpe.__file__.startswith(sys.argv[1]), fairseq_rpe.__file__
assert version("fairseq_rpe") == fairseq_rpe.__version__
from fairseq_rpe import attend, build
q, k, v = torch.randn(3, 1, 4, 9, 16, generator=torch.manual_seed(0))
weights = (q @ k.mT / 4 + build("alibi", 4, 64).mask(9)).softmax(-1)
torch.testing.assert_close(attend(q, k, v, "alibi"), weights @ v)
from fairseq_rpe.sweeps import recipes
assert all(recipes.load(name).title for name in recipes.names())
from fairseq_rpe.questions.benchmarks import benchmark_names, load_benchmark
assert benchmark_names() and all(load_benchmark(name).title for name in benchmark_names())
from fairseq_rpe.cli.main import main
assert main(["list"]) == 0
"""


def test_the_metadata_name_every_file_of_the_package(monkeypatch):
    """The cheap part of what the archives show before a release."""
    monkeypatch.chdir(ROOT)
    about = run_setup("setup.py", stop_after="init")
    assert (about.get_version(), about.get_license(), about.python_requires) == (__version__, "MIT", ">=3.11")
    assert not any("fairseq" in line for line in about.install_requires) and "fairseq" in about.extras_require
    here = {path.relative_to(ROOT) for path in PACKAGE.rglob("*") if path.is_file()}
    code = {path for path in here if path.suffix == ".py"}
    data = {path.relative_to(ROOT) for glob in about.package_data["fairseq_rpe"] for path in PACKAGE.glob(glob)}
    assert {path for path in here if is_source(path)} == data | code
    assert {path.parent for path in code} == {Path(*name.split(".")) for name in about.packages}


def is_source(path: Path) -> bool:
    return not any(part == "__pycache__" or (part.startswith(".") and part != ".ci") for part in path.parts)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The two archives, the wheel built from the source archive."""
    pytest.importorskip("build.env", reason="needs the extra check")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in TOP:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for name in (".ci/run", "data-bin/README.md"):
        (source / name).parent.mkdir()
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


@pytest.mark.release
def test_the_source_archive_has_everything(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        there = {str(Path(*Path(name).parts[1:])) for name in archive.getnames()}
    wanted = {str(p.relative_to(ROOT)) for top in TOP for p in (ROOT / top).rglob("*") if p.is_file()}
    wanted = {name for name in wanted if is_source(Path(name))}
    assert "docs/quickstart.png" in wanted and "scripts/quickstart.sh" in wanted and len(wanted) > 300
    more = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml", "setup.py", "pyproject.toml"}
    assert wanted | more | {".ci/run", "data-bin/README.md"} <= there


@pytest.mark.release
def test_the_wheel_has_the_package_and_nothing_else(built):
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        [about] = [name for name in names if name.endswith("/METADATA")]
        metadata = archive.read(about).decode()
    package = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == {p for p in package if is_source(Path(p))}
    assert "fairseq_rpe/py.typed" in names
    assert re.search(r"^Requires-Python: >=3.11$", metadata, re.MULTILINE)
    lines = metadata.splitlines()
    assert {"License: MIT", "Classifier: Typing :: Typed", "Provides-Extra: fairseq"} <= set(lines)
    assert not any("fairseq" in line for line in lines if line.startswith("Requires-Dist") and "extra" not in line)


@pytest.mark.release
def test_twine_has_nothing_to_say(built):
    pytest.importorskip("twine", reason="needs the extra check")
    assert run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()).stdout.count("PASSED") == 2


@pytest.mark.release
def test_the_wheel_works_outside_the_repository(built, tmp_path):
    place = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(*pip, "--target", place, *built.glob("*.whl"))
    environment = {**os.environ, "PYTHONPATH": str(place)}
    assert "alibi" in run(sys.executable, "-c", OUTSIDE, place, cwd=tmp_path, env=environment).stdout
