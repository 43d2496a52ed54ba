"""transformers is optional: nothing but its adapter imports it, and without it that says so in one line."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
from conftest import PACKAGE
from house import House

from fairseq_rpe.core import UserError


def test_only_its_adapter_imports_it():
    house = House(PACKAGE)
    assert house.importers("transformers") == {"adapters"}
    assert not any(
        house.local(one.module) and ".adapters" in one.module for one in house.imports if "adapters" not in one.file
    )


def test_it_is_named_where_it_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fairseq_rpe.adapters")]:
        monkeypatch.delitem(sys.modules, name)
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else there(name)
    )
    with pytest.raises(UserError, match="transformers is not installed: pip install") as caught:
        importlib.import_module("fairseq_rpe.adapters.transformers")
    assert "\n" not in str(caught.value)
