"""A plugin of pytest that records which lines of the package each test executes, in a data file of coverage.py.

    pytest -p executed_lines --executed-lines .coverage

coverage.py has contexts too, but traces every call of every library; ``sys.monitoring`` costs each line once per test.
It needs Python 3.12 and ``tests/tools`` on PYTHONPATH. With pytest-xdist each worker writes a file of its own:
``coverage combine`` makes one of them. Lines that run when a module is imported have the context "".
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import CodeType

import pytest
from coverage import CoverageData

_PACKAGE = f"{Path(__file__).resolve().parents[2] / 'fairseq_rpe'}{os.sep}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executed-lines", metavar="FILE", help="record the lines of the package that each test executes")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--executed-lines")
    if path is None or (not hasattr(config, "workerinput") and config.getoption("numprocesses", None)):
        return  # of several processes the workers record
    if sys.version_info < (3, 12):
        raise pytest.UsageError("--executed-lines needs Python 3.12 or later, for sys.monitoring")
    config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: str) -> None:
        self._lines: dict[str, set[int]] = defaultdict(set)
        self._data = CoverageData(path, suffix=os.environ.get("PYTEST_XDIST_WORKER"))
        tool, line = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
        sys.monitoring.use_tool_id(tool, "executed_lines")
        sys.monitoring.register_callback(tool, line, self._note)
        sys.monitoring.set_events(tool, line)

    def _note(self, code: CodeType, line: int) -> object:
        if code.co_filename.startswith(_PACKAGE):
            self._lines[code.co_filename].add(line)
        return sys.monitoring.DISABLE  # until the next test

    def _keep(self, context: str) -> None:
        lines, self._lines = self._lines, defaultdict(set)
        self._data.set_context(context)
        self._data.add_lines(lines)
        sys.monitoring.restart_events()

    def pytest_collection_finish(self) -> None:
        self._keep("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._keep("")  # what ran between two tests is of neither
        done = yield
        self._keep(item.nodeid)
        return done

    def pytest_unconfigure(self) -> None:
        self._keep("")
        self._data.write()
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
