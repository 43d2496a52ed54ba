"""Seeded faults in the package, and which tests notice them.

    python tests/tools/mutants.py --count 120 --seed 1 --coverage .coverage --durations junit.xml --out mutants.csv

A mutant is a copy of the tree with one small fault: a sign, a comparison, an off-by-one, a swapped argument or a
dropped statement. Mutants are drawn from a seed and are the same for the same package. Each runs against the tests
that execute the faulty line, the fastest first, until one fails; ``--coverage`` names the data file that says which
they are (see ``executed_lines.py``), and a line that no test executes is tried with the tests of its file. A test that
fails without the fault as well is left out.

    PYTHONPATH=tests/tools pytest -p executed_lines --executed-lines .coverage --junitxml junit.xml

Rows are appended to ``--out`` as they are measured, and a row that is there is not measured again.
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
_SKIPPED = {"formula", "paper", "__all__", "bounded", "depends"}  # text for people, and names


@dataclass(frozen=True)
class Mutant:
    """A replacement of the source between two offsets of a file."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def source(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]


@dataclass(frozen=True)
class Row:
    """How a mutant ended: killed by a test, or survived all of so many."""

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
    """Every place of a file where a fault can be planted."""

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
        """Replace the operator that stands between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.text[start:end]
        for operator in sorted(table, key=len, reverse=True):
            found = re.search(rf"(?<![\w<>=!*/]){re.escape(operator)}(?![\w<>=*/])", gap)
            if found and "#" not in gap:
                self._add(kind, right, start + found.start(), start + found.end(), table[operator])
                return

    def visit_Compare(self, node: ast.Compare) -> None:
        self._between("comparison", node.left, node.comparators[0], _COMPARISONS)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not isinstance(
            getattr(node.left, "value", None), int | float
        )
        if not text:  # of strings and of types another operator is an error at once
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
        pass  # Python 3.11 has no places of what is inside

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) > 1 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            first, second = (self._span(one) for one in node.args[:2])
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
        if any(isinstance(one, ast.Raise) for one in node.body):
            self._add("dropped check", node, *self._span(node.test), "False")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(one, ast.Name) and one.id in _SKIPPED for one in node.targets):
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
        for one in node.body:
            self.visit(one)


def candidates(root: Path) -> dict[str, dict[str, list[Mutant]]]:
    """The possible mutants of each file, by package and kind."""
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
    """Draw ``count`` different mutants: the package in turn, larger ones more often, then the kind, then the place."""
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
    """Which tests execute each line of each file, from the data file of coverage.py."""
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
    """Seconds of each test, by its id."""
    seconds: dict[str, float] = {}
    if junit is not None:
        for case in ElementTree.parse(junit).iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return seconds


def _statement_lines(text: str, line: int) -> list[int]:
    """The lines of the innermost statement around a line: coverage counts its first one."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    first, last = max(spans, key=lambda span: (span[0], -span[1]), default=(line, line))
    return [line, first] if last - first < 60 else [line]


def select(tests: set[str], seconds: Mapping[str, float], budget: float) -> list[str]:
    """The fastest tests, as many as take no more than ``budget`` seconds, and at least five."""
    ordered = sorted(tests, key=lambda test: (seconds.get(test, 1.0), test))
    total, chosen = 0.0, []
    for test in ordered:
        total += seconds.get(test, 1.0)
        if total > budget and len(chosen) >= 5:
            break
        chosen.append(test)
    return chosen


def run_tests(tree: Path, tests: Sequence[str], timeout: float) -> tuple[str, str]:
    """Run tests on a tree until one fails: ``killed``, ``survived`` or ``timeout``, and the test that failed."""
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


def measure(
    root: Path,
    mutants: Sequence[tuple[int, Mutant]],
    lines: Mapping[str, Mapping[int, set[str]]],
    seconds: Mapping[str, float],
    budget: float,
    jobs: int,
) -> Iterator[Row]:
    """Run the tests of each mutant; yields rows as they end."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        trees = [_copy_tree(root, Path(folder) / str(job) / "tree") for job in range(jobs)]
        sound: dict[str, bool] = {}  # of tests that failed: whether they pass without a fault

        def one(number: int, mutant: Mutant) -> Row:
            tree = trees.pop()
            path = tree / mutant.file
            text = path.read_text(encoding="utf-8")
            found: set[str] = set()
            for line in _statement_lines(text, mutant.line):
                found |= lines.get(mutant.file, {}).get(line, set())
            if not found:
                found = set().union(*lines.get(mutant.file, {}).values())
            start, result, killer = time.monotonic(), "no test", ""
            try:
                while tests := select({test for test in found if sound.get(test, True)}, seconds, budget):
                    path.write_text(mutant.source(text), encoding="utf-8")
                    result, killer = run_tests(tree, tests, 120 + 6 * budget)
                    path.write_text(text, encoding="utf-8")
                    if killer in found and killer not in sound:
                        sound[killer] = run_tests(tree, [killer], 120 + 6 * budget)[0] == "survived"
                    if sound.get(killer, True):
                        break
                    result, killer = "no test", ""
            finally:
                path.write_text(text, encoding="utf-8")
                trees.append(tree)
            took = round(time.monotonic() - start, 1)
            place = (number, mutant.file, mutant.line, mutant.kind, mutant.before[:80], mutant.after[:80])
            return Row(*place, result, len(tests), took, killer)

        for done in concurrent.futures.as_completed([pool.submit(one, *mutant) for mutant in mutants]):
            yield done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=120, help="number of mutants (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default: 1)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose package and tests are used")
    parser.add_argument("--coverage", type=Path, help="data file of coverage.py with a context for each test")
    parser.add_argument("--durations", type=Path, help="JUnit file of the same tests, for their order")
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests for a mutant (default: 120)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="CSV file; without it the mutants are printed and not run")
    args = parser.parse_args()
    mutants = list(enumerate(draw(args.tree, args.count, args.seed)))
    if args.out is None or args.coverage is None:
        for number, one in mutants:
            print(f"{number:4} {one.file}:{one.line} {one.kind}: {one.before!r} -> {one.after!r}")
        return 0
    there = set()
    if args.out.exists():
        with open(args.out, encoding="utf-8", newline="") as file:
            there = {int(row["number"]) for row in csv.DictReader(file)}
    with open(args.out, "a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if not there:
            writer.writerow([field.name for field in fields(Row)])
        left = [one for one in mutants if one[0] not in there]
        lines, seconds = tests_of_lines(args.coverage), durations(args.durations)
        for row in measure(args.tree.resolve(), left, lines, seconds, args.budget, args.jobs):
            writer.writerow(astuple(row))
            file.flush()
            print(f"{row.number:4} {row.file}:{row.line} {row.kind}: {row.result} {row.killed_by}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
