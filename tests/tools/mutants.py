"""Inserts small faults into the package and records which tests notice them.

    python tests/tools/mutants.py --count 120 --seed 1 --coverage .coverage --durations junit.xml --out mutants.csv

A mutant is a copy of the tree with one small fault: a sign, a comparison, an off-by-one, a swapped argument or a
dropped statement. Mutants are drawn from a seed and are the same for the same package.

Each mutant runs against the tests that execute the faulty line, the fastest first, until one fails. ``--coverage`` is a
data file that maps lines to tests (see ``executed_lines.py``). If no test executes the line, the tests of its file run.
A test that also fails without the fault is left out. This command records lines and durations:

    PYTHONPATH=tests/tools pytest -p executed_lines --executed-lines .coverage --junitxml junit.xml

Rows are appended to ``--out`` as they are measured; a mutant that has a row there is not measured again.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import csv
import itertools
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fairseq_rpe"
_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not"}
_COMPARISONS |= {"not in": "in", "in": "not in"}
_OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&"}
_SKIPPED = {"formula", "paper", "__all__", "bounded", "depends"}  # assignments of documentation and names
_LONG_STATEMENT = 60  # lines from which on the first line says little about a line inside
_MIN_TESTS = 5  # tests that run even if they exceed the time budget


@dataclass(frozen=True)
class Mutant:
    """A replacement of the source between two offsets of a file.

    Attributes:
        file: path in the tree.
        line: first line of the replacement, from 1.
        kind: kind of the fault.
        start: first offset, in characters.
        end: offset after the last character.
        before: replaced text.
        after: new text.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def source(self, text: str) -> str:
        """Return the text of the file with the fault."""
        return text[: self.start] + self.after + text[self.end :]


@dataclass(frozen=True)
class Row:
    """A mutant and its result.

    Attributes:
        number: number of the mutant.
        file, line, kind, before, after: as in :class:`Mutant`.
        result: ``killed``, ``survived``, ``timeout`` or ``no test``.
        tests: number of tests that ran against it.
        seconds: duration.
        killed_by: the test that failed; empty if none did.
    """

    number: int
    file: str
    line: int
    kind: str
    before: str
    after: str
    result: str
    tests: int
    seconds: float
    killed_by: str


class _Candidates(ast.NodeVisitor):
    """Collects all mutants of a file in ``mutants``."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.mutants = file, text, []  # type: ignore[var-annotated]
        # ast counts columns in bytes of UTF-8
        lengths = [len(line.encode()) for line in text.splitlines(keepends=True)]
        self._lines = [0, *itertools.accumulate(lengths)]
        self._bytes = text.encode()

    def _offset(self, line: int, column: int) -> int:
        return len(self._bytes[: self._lines[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, kind: str, node: ast.expr | ast.stmt, start: int, end: int, after: str) -> None:
        before = self.text[start:end]
        if before != after:
            line = self.text.count("\n", 0, start) + 1
            self.mutants.append(Mutant(self.file, line, kind, start, end, before, after))

    def _between(self, kind: str, left: ast.expr, right: ast.expr, table: Mapping[str, str]) -> None:
        """Add a mutant that replaces the operator between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.text[start:end]
        for operator in sorted(table, key=len, reverse=True):
            match = re.search(rf"(?<![\w<>=!*/]){re.escape(operator)}(?![\w<>=*/])", gap)
            if match and "#" not in gap:
                self._add(kind, right, start + match.start(), start + match.end(), table[operator])
                return

    def visit_Compare(self, node: ast.Compare) -> None:
        self._between("comparison", node.left, node.comparators[0], _COMPARISONS)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not isinstance(
            getattr(node.left, "value", None), int | float
        )
        if not is_text:  # another operator between texts is an error at once
            self._between("operator", node.left, node.right, _OPERATORS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between("and/or", node.values[0], node.values[1], {"and": "or", "or": "and"})
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, end = self._span(node)
        if isinstance(node.op, ast.Not | ast.USub):
            self._add("sign", node, start, end, self.text[self._span(node.operand)[0] : end])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add("constant", node, start, end, str(not node.value))
        elif isinstance(node.value, int):
            self._add("off by one", node, start, end, str(node.value + 1))
        elif isinstance(node.value, float):
            self._add("constant", node, start, end, repr(node.value * 2 + (node.value == 0)))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # Python 3.11 has no positions of the expressions inside

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) > 1 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            first, second = (self._span(argument) for argument in node.args[:2])
            swapped = self.text[slice(*second)] + self.text[first[1] : second[0]] + self.text[slice(*first)]
            self._add("swapped arguments", node, first[0], second[1], swapped)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("dropped statement", node, *self._span(node), "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("dropped statement", node, *self._span(node), "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if any(isinstance(statement, ast.Raise) for statement in node.body):
            self._add("dropped check", node, *self._span(node.test), "False")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id in _SKIPPED for target in node.targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not (isinstance(node.target, ast.Name) and node.target.id in _SKIPPED):
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:  # without decorators and annotations
            self.visit(statement)


def candidates(root: Path) -> dict[str, dict[str, list[Mutant]]]:
    """Return all possible mutants by package, then by kind."""
    table: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        visitor = _Candidates(name, text)
        visitor.visit(ast.parse(text))
        for mutant in visitor.mutants:
            table[name.split("/")[1]][mutant.kind].append(mutant)
    return table


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` different mutants: first the package, larger ones more often, then the kind, then the mutant."""
    table, chosen = candidates(root), []
    generator = random.Random(seed)
    packages = sorted(table)
    weights = [sum(map(len, table[name].values())) ** 0.5 for name in packages]
    while len(chosen) < count:
        kinds = table[generator.choices(packages, weights)[0]]
        mutant = generator.choice(kinds[generator.choice(sorted(kinds))])
        try:
            compile(mutant.source((root / mutant.file).read_text(encoding="utf-8")), mutant.file, "exec")
        except (SyntaxError, ValueError):
            continue
        if mutant not in chosen:
            chosen.append(mutant)
    return chosen


def tests_of_lines(data: Path) -> dict[str, dict[int, set[str]]]:
    """Read the tests that execute each line of each file, from a data file of coverage.py."""
    from coverage.numbits import numbits_to_nums

    table: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    with sqlite3.connect(f"file:{data}?mode=ro", uri=True) as base:
        rows = base.execute(
            "select file.path, context.context, line_bits.numbits from line_bits "
            "join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
        )
        for path, context, bits in rows:
            test = re.sub(r"(\|\w+| \(\w+\))+$", "", context.rpartition("||")[2] if "||" in context else context)
            name = PACKAGE + path.rpartition(f"/{PACKAGE}")[2] if f"/{PACKAGE}" in path else path
            if test.startswith("tests/"):
                for line in numbits_to_nums(bits):
                    table[name][line].add(test)
    return table


def durations(junit: Path | None) -> dict[str, float]:
    """Read the seconds of each test by its id; empty without a JUnit file."""
    seconds: dict[str, float] = {}
    if junit is not None:
        for case in ElementTree.parse(junit).iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return seconds


def _statement_lines(text: str, line: int) -> list[int]:
    """Return a line, and the first line of the innermost statement around it, which coverage records."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    first, last = max(spans, key=lambda span: (span[0], -span[1]), default=(line, line))
    return [line, first] if last - first < _LONG_STATEMENT else [line]


def select(tests: set[str], seconds: Mapping[str, float], budget: float) -> list[str]:
    """Return the fastest tests: those that take ``budget`` seconds together, but at least ``_MIN_TESTS``."""
    ordered = sorted(tests, key=lambda test: (seconds.get(test, 1.0), test))
    total, chosen = 0.0, []
    for test in ordered:
        total += seconds.get(test, 1.0)
        if total > budget and len(chosen) >= _MIN_TESTS:
            break
        chosen.append(test)
    return chosen


def run_tests(tree: Path, tests: Sequence[str], timeout: float) -> tuple[str, str]:
    """Run tests on a tree until one fails.

    Returns:
        ``killed``, ``survived`` or ``timeout``, and the test that failed; empty if none did.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "tests"
        names.write_text("\n".join(tests), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly"]
        command += ["--basetemp", f"{folder}/base", "-rf", "--tb=no", f"@{names}"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **outputs)
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timeout", ""
    if process.returncode == 0:
        return "survived", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", text, re.MULTILINE)
    return "killed", failed[1] if failed else f"pytest ended with {process.returncode}"


def _copy_tree(root: Path, folder: Path) -> Path:
    def skip(path: str, names: list[str]) -> set[str]:
        hidden = {name for name in names if name.startswith(".") and name not in (".ci", ".gitignore")}
        outputs = {"runs", "data-bin"} if Path(path) == root else set()  # the package has a folder runs, too
        return hidden | ({"__pycache__", *outputs} & set(names))

    return Path(shutil.copytree(root, folder, ignore=skip, symlinks=True))


class _Measurement:
    """Runs mutants in several trees at the same time.

    Args:
        trees: copies of the tree; each runs one mutant at a time.
        lines: tests that execute each line of each file.
        seconds: duration of each test.
        budget: seconds of tests for a mutant.
    """

    def __init__(
        self,
        trees: list[Path],
        lines: Mapping[str, Mapping[int, set[str]]],
        seconds: Mapping[str, float],
        budget: float,
    ) -> None:
        self._trees, self._lines, self._seconds, self._budget = trees, lines, seconds, budget
        self._timeout = 120 + 6 * budget
        self._passes_without_fault: dict[str, bool] = {}  # of tests that failed with a fault

    def measure(self, number: int, mutant: Mutant) -> Row:
        """Run the tests of a mutant in a free tree."""
        tree = self._trees.pop()
        path = tree / mutant.file
        text = path.read_text(encoding="utf-8")
        start = time.monotonic()
        try:
            result, killer, test_count = self._run(tree, path, text, mutant)
        finally:
            path.write_text(text, encoding="utf-8")
            self._trees.append(tree)
        took = round(time.monotonic() - start, 1)
        about = (number, mutant.file, mutant.line, mutant.kind, mutant.before[:80], mutant.after[:80])
        return Row(*about, result, test_count, took, killer)

    def _run(self, tree: Path, path: Path, text: str, mutant: Mutant) -> tuple[str, str, int]:
        """Return the result, the test that failed, and the number of tests."""
        candidates = self._tests_of(mutant, text)
        while True:
            sound = {test for test in candidates if self._passes_without_fault.get(test, True)}
            tests = select(sound, self._seconds, self._budget)
            if not tests:
                return "no test", "", 0
            path.write_text(mutant.source(text), encoding="utf-8")
            result, killer = run_tests(tree, tests, self._timeout)
            path.write_text(text, encoding="utf-8")
            if killer in candidates and killer not in self._passes_without_fault:
                self._passes_without_fault[killer] = run_tests(tree, [killer], self._timeout)[0] == "survived"
            if self._passes_without_fault.get(killer, True):
                return result, killer, len(tests)

    def _tests_of(self, mutant: Mutant, text: str) -> set[str]:
        """Return the tests that execute the line of a mutant, or else those of its file."""
        lines = self._lines.get(mutant.file, {})
        tests = set().union(*(lines.get(line, set()) for line in _statement_lines(text, mutant.line)))
        return tests or set().union(*lines.values())


def measure(
    root: Path,
    mutants: Sequence[tuple[int, Mutant]],
    lines: Mapping[str, Mapping[int, set[str]]],
    seconds: Mapping[str, float],
    budget: float,
    jobs: int,
) -> Iterator[Row]:
    """Run the tests of each mutant, ``jobs`` mutants at the same time, and yield rows as they end."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        trees = [_copy_tree(root, Path(folder) / str(job) / "tree") for job in range(jobs)]
        measurement = _Measurement(trees, lines, seconds, budget)
        futures = [pool.submit(measurement.measure, number, mutant) for number, mutant in mutants]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=120, help="number of mutants (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the mutants (default: 1)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose package and tests are used")
    parser.add_argument("--coverage", type=Path, help="data file of coverage.py with a context for each test")
    parser.add_argument("--durations", type=Path, help="JUnit file of the same tests, for their order")
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests for a mutant (default: 120)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="CSV file; without it the mutants are printed and not run")
    args = parser.parse_args()
    mutants = list(enumerate(draw(args.tree, args.count, args.seed)))
    if args.out is None or args.coverage is None:
        for number, mutant in mutants:
            print(f"{number:4} {mutant.file}:{mutant.line} {mutant.kind}: {mutant.before!r} -> {mutant.after!r}")
        return 0
    measured = set()
    if args.out.exists():
        with open(args.out, encoding="utf-8", newline="") as file:
            measured = {int(row["number"]) for row in csv.DictReader(file)}
    with open(args.out, "a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if not measured:
            writer.writerow([field.name for field in fields(Row)])
        remaining = [(number, mutant) for number, mutant in mutants if number not in measured]
        lines, seconds = tests_of_lines(args.coverage), durations(args.durations)
        for row in measure(args.tree.resolve(), remaining, lines, seconds, args.budget, args.jobs):
            writer.writerow(astuple(row))
            file.flush()
            print(f"{row.number:4} {row.file}:{row.line} {row.kind}: {row.result} {row.killed_by}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
