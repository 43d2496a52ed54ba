"""A plugin of pytest that records which lines of the package each test executes, in a data file of coverage.py.

    pytest -p executed_lines --executed-lines .coverage

coverage.py can record contexts, too, but it traces every call of every library; ``sys.monitoring`` reports each line
once per test. The plugin needs Python 3.12, and ``tests/tools`` on PYTHONPATH. With pytest-xdist each worker writes its
own file, which ``coverage combine`` merges. Lines that run while a module is imported have the context "".
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
        return  # with pytest-xdist, only the workers record
    if sys.version_info < (3, 12):
        raise pytest.UsageError("--executed-lines needs Python 3.12 or later, for sys.monitoring")
    config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: str) -> None:
        self._lines: dict[str, set[int]] = defaultdict(set)
        self._data = CoverageData(path, suffix=os.environ.get("PYTEST_XDIST_WORKER"))
        tool, line = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
        sys.monitoring.use_tool_id(tool, "executed_lines")
        sys.monitoring.register_callback(tool, line, self._record_line)
        sys.monitoring.set_events(tool, line)

    def _record_line(self, code: CodeType, line: int) -> object:
        if code.co_filename.startswith(_PACKAGE):
            self._lines[code.co_filename].add(line)
        return sys.monitoring.DISABLE  # until restart_events before the next test

    def _store(self, context: str) -> None:
        """Store the recorded lines under the name of a test, and record all lines anew."""
        lines, self._lines = self._lines, defaultdict(set)
        self._data.set_context(context)
        self._data.add_lines(lines)
        sys.monitoring.restart_events()

    def pytest_collection_finish(self) -> None:
        self._store("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._store("")  # lines that ran between two tests
        result = yield
        self._store(item.nodeid)
        return result

    def pytest_unconfigure(self) -> None:
        self._store("")
        self._data.write()
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
