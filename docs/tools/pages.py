"""Hooks of mkdocs (``mkdocs.yml``): pages of the site that are not files of docs/, and links that leave docs/.

The front page is README.md and the second one CONTRIBUTING.md, which are outside docs/ and are not copied. A page of
``api/`` lists the public names of a package for mkdocstrings, which reads their docstrings from the source: nothing is
imported.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # file of the repository -> page of the site
REGISTERED = {
    "encodings": "Encodings",
    "positions": "Position transforms",
}  # package -> heading of its registered classes
# names of fairseq_rpe itself, listed first on the page of the package that defines them
FRONT = {
    "attention": {
        "attend": "attention.functional.attend",
        "RelativeAttention": "attention.functional.RelativeAttention",
    }
}
LINK = re.compile(r"(?<=\]\()(\.\./|docs/)?([\w./-]+)")


def public_names(package: str) -> tuple[dict[str, str], list[str]]:
    """Return ``__all__`` of a package as name -> dotted path, and the names that are methods of its registry."""
    path = ROOT / "fairseq_rpe" / package / "__init__.py"
    if package == "core":  # imports its names on first use
        names = runpy.run_path(str(path))
        modules = names["_MODULE_OF_NAME"]
        return {name: f"core.{modules.get(name, 'bias')}.{name}" for name in sorted(names["__all__"])}, []
    listed: list[str] = []
    home: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fairseq_rpe."):
            module = (node.module or "").removeprefix("fairseq_rpe.")
            home |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef):
            home[node.name] = f"{package}.{node.name}"
    home["option"] = "core.spec.option"
    methods = [name for name in listed if name == "register" or name not in home]
    names = {name: home[name] for name in sorted(listed) if name not in methods}
    return {**FRONT.get(package, {}), **names}, methods


def registered(package: str) -> Iterator[tuple[str, str]]:
    """Yield name and dotted path of every class that a package registers, sorted by name."""
    classes = []
    for path in (ROOT / "fairseq_rpe" / package).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "register":
                        classes.append((ast.literal_eval(call.args[0]), f"{package}.{path.stem}.{node.name}"))
    yield from sorted(classes)


def api(package: str) -> str:
    """Return the Markdown of a package's page for mkdocstrings."""
    lines = [f"# fairseq_rpe.{package}", "", f"::: fairseq_rpe.{package}", "    options:"]
    lines += ["      show_root_heading: false", "      show_root_toc_entry: false", "      members: false", ""]
    names, methods = public_names(package)
    if methods:
        called = ", ".join(f"`{name}`" for name in methods)
        lines += [f"{called}: methods of the package's [registry][fairseq_rpe.core.registry.Registry].", ""]
    for name, path in names.items():
        if path.startswith("core.") and package != "core":
            lines += [f"`{name}`: see [core][fairseq_rpe.{path}].", ""]
        else:
            lines += [f"::: fairseq_rpe.{path}", ""]
    if package in REGISTERED:
        lines += [f"## {REGISTERED[package]}", ""]
        for name, path in registered(package):
            lines += [f"::: fairseq_rpe.{path}", "    options:", "      heading_level: 3", f"      heading: {name}", ""]
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and the pages of the API."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for package in ("core", "encodings", "positions", "attention"):
        files.append(File.generated(config, f"api/{package}.md", content=api(package)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between the repository's root and docs/ into links between pages."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    return LINK.sub(lambda match: OUTSIDE.get(match[2], match[2]), markdown)
