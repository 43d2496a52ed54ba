"""The rules of the house, read from a package's source: who imports whom, circles, names, lengths, signatures."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SCIENCE = {"core", "utils", "encodings", "positions", "algorithms", "attention", "checkpoints"}
GLUE = {"compat", "modules", "criterions", "tasks", "models"}
_RUNS = {*SCIENCE, "decoder", "analysis", "figures", "data", "questions", *GLUE}
# room: the rooms that it may import beside itself
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "utils": {"core"},
    "checkpoints": {"core", "utils"},
    "encodings": {"core", "utils", "checkpoints"},
    "positions": {"core", "utils", "encodings"},
    "algorithms": {"core", "utils"},
    "attention": {"core", "utils", "encodings"},
    "analysis": SCIENCE,
    "decoder": SCIENCE,
    "figures": {"core", "utils", "encodings", "analysis"},
    "data": {"core", "utils"},
    "questions": {"core", "utils", "data"},
    "compat": {"core", "utils", "checkpoints", "encodings"},
    "modules": {*SCIENCE, "decoder", "analysis", "figures"},
    "criterions": {*SCIENCE, "modules"},
    "tasks": {*SCIENCE, "decoder", "data", "questions", "modules"},
    "models": {*SCIENCE, "decoder", *GLUE},
    "runs": _RUNS,
    "evaluation": {*_RUNS, "runs"},
    "adapters": {*SCIENCE, "data", "modules", "evaluation"},
    "sweeps": {*_RUNS, "runs", "evaluation"},
    "reports": {*_RUNS, "runs", "evaluation", "sweeps"},
    "cli": {*_RUNS, "runs", "evaluation", "sweeps", "reports"},
    "": {"models"},  # the package itself registers with fairseq
}
FAIRSEQ = {"compat", "modules", "criterions", "tasks", "models", "runs", "evaluation"}


@dataclass(frozen=True)
class Import:
    """An import statement of ``file``: the module that it names, and whether it stands inside a function."""

    file: str
    module: str
    inside: bool


@dataclass(frozen=True)
class House:
    """The modules of a package below ``root``, by dotted name within it; ``core.spec`` is the file core/spec.py."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.files.items()}

    @cached_property
    def imports(self) -> list[Import]:
        return [found for name, tree in self.trees.items() for found in self._of(name, tree, False)]

    def _of(self, name: str, node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(name, alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._base(name, child)
                for alias in child.names:
                    whole = f"{base}.{alias.name}"
                    yield Import(name, whole if self.local(whole) else base, inside)
            elif not self._for_types(child):
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from self._of(name, child, inside or function)

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.files[name].relative_to(self.root.parent).parent.parts
        up = package[: len(package) - node.level + 1]
        return ".".join([*up, *([node.module] if node.module else [])])

    @staticmethod
    def _for_types(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"

    def local(self, module: str) -> str | None:
        """The name within the package of a module of it."""
        top, _, rest = module.partition(".")
        return rest if top == self.root.name and rest in self.files else None

    @staticmethod
    def room(name: str) -> str:
        return name.partition(".")[0]

    def wrong_arrows(self, arrows: Mapping[str, set[str]]) -> list[str]:
        """Imports of a room that a room may not import."""
        found = set()
        for one in self.imports:
            here, there = self.room(one.file), self.local(one.module)
            if there and self.room(there) not in {here, *arrows.get(here, ())}:
                found.add(f"{one.file} imports {there}")
        return sorted(found)

    def circles(self) -> list[set[str]]:
        """Files that import each other in a circle, imports inside functions included."""
        after: dict[str, set[str]] = {name: set() for name in self.files}
        for one in self.imports:
            there = self.local(one.module)
            if there is not None and there != one.file:
                after[one.file].add(there)
        reach = {name: _reach(name, after) for name in after}
        return sorted(({m for m in reach[n] if n in reach[m]} for n in reach if n in reach[n]), key=sorted)

    def late(self) -> dict[str, set[str]]:
        """What is imported inside functions: a top-level package, or ``.`` for this one -> the files."""
        found: dict[str, set[str]] = {}
        for one in self.imports:
            if one.inside:
                top = "." if self.local(one.module) is not None else one.module.partition(".")[0]
                found.setdefault(top, set()).add(one.file)
        return found

    def importers(self, *tops: str) -> set[str]:
        """The rooms that import a top-level package."""
        return {self.room(one.file) for one in self.imports if one.module.partition(".")[0] in tops}

    def lines(self, name: str) -> int:
        return len(self.files[name].read_text(encoding="utf-8").splitlines())

    def signatures_with(self, annotation: str) -> list[str]:
        """Functions and fields of records whose annotations contain ``annotation``, as file:line."""
        found = []
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                given: list[ast.expr | None] = []
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    named = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    given = [node.returns, *(argument.annotation for argument in named)]
                elif isinstance(node, ast.ClassDef):
                    given = [part.annotation for part in node.body if isinstance(part, ast.AnnAssign)]
                if any(one is not None and annotation in ast.unparse(one) for one in given):
                    found.append(f"{name}:{node.lineno}")
        return found


def _reach(start: str, after: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in after.get(todo.pop(), ()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen
