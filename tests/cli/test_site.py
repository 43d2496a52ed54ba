"""The site of docs/: built without a warning, every page and public name on it, nothing fetched by its readers."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("material", reason="needs the extra check")
pytest.importorskip("mkdocstrings_handlers.python", reason="needs the extra check")

pytestmark = pytest.mark.release
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "encodings", "positions", "attention")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    beside = str(Path(sys.executable).parent)  # ruff, which formats signatures
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PATH": os.pathsep.join([beside, os.environ["PATH"]])}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "contributing"}
    assert pages <= {path.stem for path in site.glob("*.html")}
    assert not list(site.glob("tools/*.py"))


def test_markdown_that_github_reads_is_read_here_too(site):
    """No row of a table, link, fence or list is left as text."""
    for path in site.glob("*.html"):
        body = re.search(r"<article.*</article>", path.read_text(encoding="utf-8"), re.DOTALL)
        if body:
            assert not re.search(r"<code>[^<]*\\\|", body[0]), f"{path.name}: an escaped bar in code shows its escape"
            text = re.sub(r"<[^>]+>", "", re.sub(r"<(pre|code)\b.*?</\1>", "", body[0], flags=re.DOTALL))
            left = re.search(r"\| ?---|^\||\]\(|```|^- |<!--", unescape(text), re.MULTILINE)
            assert not left, f"{path.name}: {text[left.start() : left.start() + 80]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_their_docstrings(package, site):
    page = (site / "api" / f"{package}.html").read_text(encoding="utf-8")
    module = importlib.import_module(f"fairseq_rpe.{package}")
    for name in module.__all__:
        assert re.search(rf'id="fairseq_rpe\.[\w.]*\.{name}"|<code>{name}</code>', page), name
    registry = getattr(getattr(module, "base", None), "registry", None)
    for cls in [registry.get(name) for name in registry.names()] if registry else ():
        if cls.__module__.startswith("fairseq_rpe."):
            assert f'id="{cls.__module__}.{cls.__name__}"' in page, cls


def test_readers_fetch_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'<(script|img|iframe)[^>]+src="?(https?:)?//', text), path
        assert not re.search(r'<link[^>]+rel="?(stylesheet|preconnect)"?[^>]+href="?(https?:)?//', text), path
