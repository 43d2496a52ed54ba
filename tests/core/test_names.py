"""Names of the package: identifiers that say nothing, and words that the glossary of CONTRIBUTING.md replaces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from conftest import PACKAGE

FILES = sorted(Path(PACKAGE).rglob("*.py"))
# Participles and pronouns that do not say what a value is.
VAGUE = {"found", "own", "one", "given", "made", "said", "told", "asked", "wanted", "known", "kept", "some", "few"}
VAGUE |= {"place", "part"}
# Words of the right column of the glossary in CONTRIBUTING.md; the left column has the word to use.
REPLACED = {"asks", "beside", "carry_out", "doors", "findings", "finding", "judged", "of_content", "only_turns"}
REPLACED |= {"planted", "reads_length", "reads_tokens", "remap", "reading", "settle", "settled", "turn", "turned"}
REPLACED |= {"turns", "weighs", "remainder_of", "subset", "reach"}


def names(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Every name that is assigned, is a parameter or is defined: (line, name, whether it is that of a definition)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, False
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name, True


def test_names_that_the_package_does_not_use():
    hits = []
    for path in FILES:
        for line, name, is_definition in names(ast.parse(path.read_text(encoding="utf-8"))):
            if name in REPLACED or (name in VAGUE and not is_definition):
                hits.append(f"{path}:{line}: {name}")
    assert hits == []


def test_the_glossary_has_the_replaced_words():
    contributing = Path(PACKAGE).parent / "CONTRIBUTING.md"
    glossary = contributing.read_text(encoding="utf-8").partition("## Glossary")[2]
    assert REPLACED <= set(re.findall(r"\w+", glossary))
