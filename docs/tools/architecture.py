"""Draw the packages and their imports as docs/architecture.svg: ``python docs/tools/architecture.py [--check]``.

The picture follows from the import statements of the package. An arrow from A to B means that A imports B. Arrows that
a longer path implies are left out.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fairseq_rpe"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 112, 28, 40, 26, 12  # pixels
FAIRSEQ = {"compat", "criterions", "evaluation", "models", "modules", "runs", "tasks"}


def package_imports(root: Path = ROOT / PACKAGE) -> dict[str, set[str]]:
    """Return the packages that each package imports, imports inside functions included."""
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    imports: dict[str, set[str]] = {name: set() for name in packages}
    for path in root.glob("*/**/*.py"):
        package = path.relative_to(root).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                parts = module.split(".")
                if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in packages - {package}:
                    imports[package].add(parts[1])
    return imports


def reachable(name: str, edges: dict[str, set[str]]) -> set[str]:
    """Return all packages that a path of at least one arrow from ``name`` reaches."""
    reached: set[str] = set()
    pending = list(edges[name])
    while pending:
        target = pending.pop()
        if target not in reached:
            reached.add(target)
            pending += edges[target]
    return reached


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows that no longer path implies."""
    return {
        name: {target for target in targets if not any(target in reachable(other, edges) for other in targets)}
        for name, targets in edges.items()
    }


def layers(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the packages by the length of their longest import path, those without imports first."""
    depth: dict[str, int] = {}

    def depth_of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((depth_of(target) for target in edges[name]), default=-1)
        return depth[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(depth_of, edges)))]
    for name in sorted(edges):
        rows[depth[name]].append(name)
    return rows


def ordered(rows: list[list[str]], edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the rows with packages near those that they import, so that few arrows cross."""
    column: dict[str, float] = {}
    result = []
    for row in rows:
        center = {name: sum(column[t] for t in edges[name]) / max(1, len(edges[name])) for name in row}
        row = sorted(row, key=lambda name: (center[name], name))
        for index, name in enumerate(row):
            column[name] = index - (len(row) - 1) / 2
        result.append(row)
    return result


def svg(imports: dict[str, set[str]]) -> str:
    """Return the picture: the packages that import nothing at the top, arrows from importing to imported packages."""
    edges = reduced(imports)
    rows = ordered(layers(imports), edges)
    total = max(map(len, rows)) * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    place = {
        name: ((total - len(row) * (WIDTH + GAP_X) + GAP_X) / 2 + i * (WIDTH + GAP_X), MARGIN + r * (HEIGHT + GAP_Y))
        for r, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    height = len(rows) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:g} {height:g}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#607080"/></marker></defs>',
        f'<rect width="{total:g}" height="{height:g}" fill="white"/>',
    ]
    for name, targets in sorted(edges.items()):
        x, y = place[name]
        for target in sorted(targets):
            to_x, to_y = place[target]
            start, end = (x + WIDTH / 2, y), (to_x + WIDTH / 2, to_y + HEIGHT + 2)
            bend = GAP_Y * 0.6
            path = f"M{start[0]:g} {start[1]:g}C{start[0]:g} {start[1] - bend:g} {end[0]:g} {end[1] + bend:g}"
            lines.append(
                f'<path d="{path} {end[0]:g} {end[1]:g}" fill="none" stroke="#607080" stroke-width="1.2" '
                'marker-end="url(#head)"/>'
            )
    for name, (x, y) in sorted(place.items()):
        colour = "#fde8c8" if name in FAIRSEQ else "#dce8f8"
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}" stroke="#405060"/>'
        )
        lines.append(
            f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 5:g}" font-size="14" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    """Write the picture, or with ``--check`` compare it with the file."""
    parser = argparse.ArgumentParser(description="Draw the packages and their imports as docs/architecture.svg.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the picture is out of date")
    check = parser.parse_args().check
    path, picture = ROOT / "docs/architecture.svg", svg(package_imports())
    if path.is_file() and path.read_text(encoding="utf-8") == picture:
        return 0
    if not check:
        path.write_text(picture, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {'out of date, run python docs/tools/architecture.py' if check else 'written'}")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
