"""The imports between the packages of fairseq_rpe: which are allowed, and which exist in the source."""

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
    "figures": {"core", "utils", "encodings", "positions", "analysis"},
    "data": {"core", "utils"},
    "questions": {"core", "utils", "data"},
    "compat": {"core", "utils", "checkpoints", "encodings"},
    "modules": {*SCIENCE, "decoder", "analysis", "figures"},
    "criterions": {*SCIENCE, "modules"},
    "tasks": {*SCIENCE, "decoder", "data", "questions", "modules"},
    "models": {*SCIENCE, "decoder", *GLUE},
    "runs": _RUNS,
    "evaluation": {*_RUNS, "runs"},
    "adapters": {*_RUNS, "runs", "evaluation"},
    "sweeps": {*_RUNS, "runs", "evaluation"},
    "reports": {*_RUNS, "runs", "evaluation", "sweeps"},
    "kinds": {*_RUNS, "runs", "evaluation", "sweeps", "reports"},
    "cli": {*_RUNS, "runs", "evaluation", "adapters", "sweeps", "reports", "kinds"},
    # registers with fairseq and transformers; functions that it imports on first use
    "": {"models", "attention", "encodings", "adapters"},
}
FAIRSEQ = {"compat", "modules", "criterions", "tasks", "models", "runs", "evaluation"}


@dataclass(frozen=True)
class Import:
    """An import statement.

    Attributes:
        file: module that has the statement.
        module: imported module.
        inside: whether the statement is inside a function.
    """

    file: str
    module: str
    inside: bool


@dataclass(frozen=True)
class PackageImports:
    """The modules of the package in the folder ``root`` and their imports; the module core/spec.py is ``core.spec``."""

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
                    submodule = f"{base}.{alias.name}"  # unless the alias is a class or function of ``base``
                    yield Import(name, submodule if self.local(submodule) else base, inside)
            else:
                is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from self._imports_in(name, child, inside or is_function)

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module from which a module imports."""
        if not node.level:
            return node.module or ""
        package = self.files[name].relative_to(self.root.parent).parent.parts
        up = package[: len(package) - node.level + 1]
        return ".".join([*up, *([node.module] if node.module else [])])

    def local(self, module: str) -> str | None:
        """Return the name of a module within the package, or None for a module of another package."""
        top, _, rest = module.partition(".")
        return rest if top == self.root.name and rest in self.files else None

    @staticmethod
    def package(name: str) -> str:
        """The subpackage of a module."""
        return name.partition(".")[0]

    def forbidden_imports(self, allowed: Mapping[str, set[str]]) -> list[str]:
        """Return the imports of packages that ``allowed`` does not list for the importing package."""
        forbidden = set()
        for item in self.imports:
            importer, imported = self.package(item.file), self.local(item.module)
            if imported and self.package(imported) not in {importer, *allowed.get(importer, ())}:
                forbidden.add(f"{item.file} imports {imported}")
        return sorted(forbidden)

    def cycles(self) -> list[set[str]]:
        """Return the sets of modules that import each other, directly or not.

        Imports inside functions and those for type checkers alone count, too.
        """
        imported_by: dict[str, set[str]] = {name: set() for name in self.files}
        for item in self.imports:
            imported = self.local(item.module)
            if imported is not None and imported != item.file:
                imported_by[item.file].add(imported)
        closure = {name: _reachable(name, imported_by) for name in imported_by}
        in_cycles = [name for name in closure if name in closure[name]]
        return sorted(({other for other in closure[name] if name in closure[other]} for name in in_cycles), key=sorted)

    def imports_in_functions(self) -> dict[str, set[str]]:
        """Return the modules with imports inside functions, by imported top-level package; ``.`` is this package."""
        files: dict[str, set[str]] = {}
        for item in self.imports:
            if item.inside:
                top = "." if self.local(item.module) is not None else item.module.partition(".")[0]
                files.setdefault(top, set()).add(item.file)
        return files

    def importers(self, *tops: str) -> set[str]:
        """Return the packages that import one of these top-level packages."""
        return {self.package(item.file) for item in self.imports if item.module.partition(".")[0] in tops}

    def lines(self, name: str) -> int:
        return len(self.files[name].read_text(encoding="utf-8").splitlines())

    def signatures_with(self, annotation: str) -> list[str]:
        """Return functions and classes with ``annotation`` among their annotations, as file:line."""
        places = []
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                annotations: list[ast.expr | None] = []
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    named = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    annotations = [node.returns, *(argument.annotation for argument in named)]
                elif isinstance(node, ast.ClassDef):
                    annotations = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
                if any(item is not None and annotation in ast.unparse(item) for item in annotations):
                    places.append(f"{name}:{node.lineno}")
        return places


def _reachable(start: str, imported_by: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that ``start`` imports, directly or through others."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        for name in imported_by.get(pending.pop(), ()):
            if name not in seen:
                seen.add(name)
                pending.append(name)
    return seen
