"""Imports between the packages of fairseq_rpe, read from their source: which are allowed, and which exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SCIENCE = {"core", "utils", "encodings", "positions", "algorithms", "attention", "checkpoints"}
GLUE = {"compat", "modules", "criterions", "tasks", "models"}
_RUNS = {*SCIENCE, "decoder", "analysis", "figures", "data", "questions", *GLUE}
# package -> the packages that it may import besides itself
ALLOWED_IMPORTS: dict[str, set[str]] = {
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
    """An import statement of ``file``: the imported module, and whether it is inside a function."""

    file: str
    module: str
    inside: bool


@dataclass(frozen=True)
class PackageImports:
    """The modules of the package at ``root`` and their imports; ``core.spec`` stands for the file core/spec.py."""

    root: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        files = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return files

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.files.items()}

    @cached_property
    def imports(self) -> list[Import]:
        return [item for name, tree in self.trees.items() for item in self._imports_in(name, tree, False)]

    def _imports_in(self, name: str, node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(name, alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._base(name, child)
                for alias in child.names:
                    whole = f"{base}.{alias.name}"
                    yield Import(name, whole if self.local(whole) else base, inside)
            elif not self._is_type_checking(child):
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from self._imports_in(name, child, inside or function)

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.files[name].relative_to(self.root.parent).parent.parts
        up = package[: len(package) - node.level + 1]
        return ".".join([*up, *([node.module] if node.module else [])])

    @staticmethod
    def _is_type_checking(node: ast.AST) -> bool:
        return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"

    def local(self, module: str) -> str | None:
        """The name of a module within the package; None if it is another package's."""
        top, _, rest = module.partition(".")
        return rest if top == self.root.name and rest in self.files else None

    @staticmethod
    def package(name: str) -> str:
        """The subpackage of a module."""
        return name.partition(".")[0]

    def forbidden_imports(self, allowed: Mapping[str, set[str]]) -> list[str]:
        """Imports of packages that a package may not import."""
        forbidden = set()
        for item in self.imports:
            importer, imported = self.package(item.file), self.local(item.module)
            if imported and self.package(imported) not in {importer, *allowed.get(importer, ())}:
                forbidden.add(f"{item.file} imports {imported}")
        return sorted(forbidden)

    def cycles(self) -> list[set[str]]:
        """Import cycles of files, counting imports inside functions."""
        after: dict[str, set[str]] = {name: set() for name in self.files}
        for item in self.imports:
            imported = self.local(item.module)
            if imported is not None and imported != item.file:
                after[item.file].add(imported)
        closure = {name: _reachable(name, after) for name in after}
        return sorted(({m for m in closure[n] if n in closure[m]} for n in closure if n in closure[n]), key=sorted)

    def imports_in_functions(self) -> dict[str, set[str]]:
        """Top-level packages imported inside functions (``.`` for this package) -> the files that do it."""
        files: dict[str, set[str]] = {}
        for item in self.imports:
            if item.inside:
                top = "." if self.local(item.module) is not None else item.module.partition(".")[0]
                files.setdefault(top, set()).add(item.file)
        return files

    def importers(self, *tops: str) -> set[str]:
        """The packages that import a top-level package."""
        return {self.package(item.file) for item in self.imports if item.module.partition(".")[0] in tops}

    def lines(self, name: str) -> int:
        return len(self.files[name].read_text(encoding="utf-8").splitlines())

    def signatures_with(self, annotation: str) -> list[str]:
        """Functions and fields of records whose annotations contain ``annotation``, as file:line."""
        found = []
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                annotations: list[ast.expr | None] = []
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    named = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    annotations = [node.returns, *(argument.annotation for argument in named)]
                elif isinstance(node, ast.ClassDef):
                    annotations = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
                if any(item is not None and annotation in ast.unparse(item) for item in annotations):
                    found.append(f"{name}:{node.lineno}")
        return found


def _reachable(start: str, after: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in after.get(todo.pop(), ()):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return seen
