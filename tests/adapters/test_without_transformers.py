"""transformers is optional: nothing but its adapter imports it, and without it that says so in one line."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys

from conftest import PACKAGE
from refusal import refused


def test_only_its_adapter_imports_it():
    names = re.compile(r"^\s*(import|from) transformers\b", re.MULTILINE)
    importers = [path for path in PACKAGE.rglob("*.py") if names.search(path.read_text(encoding="utf-8"))]
    assert {path.relative_to(PACKAGE).parts[0] for path in importers} == {"adapters"}


def test_it_is_named_where_it_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fairseq_rpe.adapters")]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else found(name, *a)
    )
    with refused("transformers is not installed: pip install"):
        importlib.import_module("fairseq_rpe.adapters.transformers")
