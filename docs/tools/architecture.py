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


def without_implied(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows without those that a longer path implies."""
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


def order_rows(rows: list[list[str]], edges: dict[str, set[str]]) -> list[list[str]]:
    """Sort each row so that packages are near those that they import, and few arrows cross."""
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
    edges = without_implied(imports)
    rows = order_rows(layers(imports), edges)
    width = row_width(max(rows, key=len)) + 2 * MARGIN
    height = len(rows) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    corners: dict[str, tuple[float, float]] = {}  # top left corner of each box; rows are centred
    for number, row in enumerate(rows):
        left, top = (width - row_width(row)) / 2, MARGIN + number * (HEIGHT + GAP_Y)
        for column, name in enumerate(row):
            corners[name] = (left + column * (WIDTH + GAP_X), top)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#607080"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for name, targets in sorted(edges.items()):
        lines += [arrow(corners[name], corners[target]) for target in sorted(targets)]
    for name, corner in sorted(corners.items()):
        lines += box(name, corner)
    return "\n".join([*lines, "</svg>"]) + "\n"


def row_width(row: list[str]) -> int:
    """Return the width of a row of boxes in pixels."""
    return len(row) * (WIDTH + GAP_X) - GAP_X


def arrow(corner: tuple[float, float], target_corner: tuple[float, float]) -> str:
    """Return a curve from the top of a box to the bottom of the box of an imported package."""
    start_x, start_y = corner[0] + WIDTH / 2, corner[1]
    end_x, end_y = target_corner[0] + WIDTH / 2, target_corner[1] + HEIGHT + 2
    bend = GAP_Y * 0.6
    path = f"M{start_x:g} {start_y:g}C{start_x:g} {start_y - bend:g} {end_x:g} {end_y + bend:g} {end_x:g} {end_y:g}"
    return f'<path d="{path}" fill="none" stroke="#607080" stroke-width="1.2" marker-end="url(#head)"/>'


def box(name: str, corner: tuple[float, float]) -> list[str]:
    """Return the box of a package and its name; packages that import fairseq have another colour."""
    x, y = corner
    colour = "#fde8c8" if name in FAIRSEQ else "#dce8f8"
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}" stroke="#405060"/>',
        f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 5:g}" font-size="14" text-anchor="middle">{name}</text>',
    ]


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
