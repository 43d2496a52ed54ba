"""Hooks of mkdocs (``mkdocs.yml``): pages of the site that are not files of docs/, and links that leave docs/.

The front page is README.md and the second one CONTRIBUTING.md, which lie outside docs/ and are not copied. A page of
``api/`` lists the public names of a room for mkdocstrings, which reads their docstrings from the source: nothing of
the package is imported.
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
REGISTERED = {"encodings": "Encodings", "positions": "Position transforms"}  # room -> heading of what it registers
# names of the package itself, listed first in the room that has them
FRONT = {
    "attention": {
        "attend": "attention.functional.attend",
        "RelativeAttention": "attention.functional.RelativeAttention",
    }
}
LINK = re.compile(r"(?<=\]\()(\.\./|docs/)?([\w./-]+)")


def public_names(room: str) -> tuple[dict[str, str], list[str]]:
    """``__all__`` of a room: name -> dotted path below the package; and names that are methods of its registry."""
    path = ROOT / "fairseq_rpe" / room / "__init__.py"
    if room == "core":  # looks its names up when they are used
        found = runpy.run_path(str(path))["_HOME"]
        return {name: f"core.{found[name]}.{name}" for name in sorted(found)}, []
    listed: list[str] = []
    home: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            module = node.module if node.level == 2 else ".".join(filter(None, (room, node.module)))
            home |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef):
            home[node.name] = f"{room}.{node.name}"
    home["option"] = "core.spec.option"
    methods = [name for name in listed if name == "register" or name not in home]
    names = {name: home[name] for name in sorted(listed) if name not in methods}
    return {**FRONT.get(room, {}), **names}, methods


def registered(room: str) -> Iterator[tuple[str, str]]:
    """Name and dotted path of every class that the room registers, in the order of names."""
    found = []
    for path in (ROOT / "fairseq_rpe" / room).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "register":
                        found.append((ast.literal_eval(call.args[0]), f"{room}.{path.stem}.{node.name}"))
    yield from sorted(found)


def api(room: str) -> str:
    """Markdown of a room's page, for mkdocstrings to fill."""
    lines = [f"# fairseq_rpe.{room}", "", f"::: fairseq_rpe.{room}", "    options:"]
    lines += ["      show_root_heading: false", "      show_root_toc_entry: false", "      members: false", ""]
    names, methods = public_names(room)
    if methods:
        called = ", ".join(f"`{name}`" for name in methods)
        lines += [f"{called}: methods of the room's [registry][fairseq_rpe.core.registry.Registry].", ""]
    for name, path in names.items():
        if path.startswith("core.") and room != "core":
            lines += [f"`{name}`: see [core][fairseq_rpe.{path}].", ""]
        else:
            lines += [f"::: fairseq_rpe.{path}", ""]
    if room in REGISTERED:
        lines += [f"## {REGISTERED[room]}", ""]
        for name, path in registered(room):
            lines += [f"::: fairseq_rpe.{path}", "    options:", "      heading_level: 3", f"      heading: {name}", ""]
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for room in ("core", "encodings", "positions", "attention"):
        files.append(File.generated(config, f"api/{room}.md", content=api(room)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between the repository's root and docs/ become links between pages."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    return LINK.sub(lambda found: OUTSIDE.get(found[2], found[2]), markdown)
