"""Names of the package: identifiers that say nothing, and words that the glossary of CONTRIBUTING.md replaces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PACKAGE

FILES = sorted(Path(PACKAGE).rglob("*.py"))
# Participles and pronouns that do not say what a value is.
VAGUE = {"found", "own", "one", "given", "made", "said", "told", "asked", "wanted", "known", "kept", "some", "few"}
VAGUE |= {"place", "part"}
# Words of the right column of the glossary in CONTRIBUTING.md; the left column has the word to use.
REPLACED = {"asks", "beside", "carry_out", "doors", "findings", "finding", "judged", "of_content", "only_turns"}
REPLACED |= {"planted", "reads_length", "reads_tokens", "remap", "reading", "settle", "settled", "turn", "turned"}
REPLACED |= {"turns", "weighs", "remainder_of", "subset", "reach"}


def assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that is assigned, is a parameter or is an attribute of ``self``: (line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that is assigned or defined: (line, name)."""
    yield from assigned(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name


@pytest.mark.parametrize(("names", "words"), [(assigned, VAGUE), (defined, REPLACED)], ids=["vague", "replaced"])
def test_names_that_the_package_does_not_use(names, words):
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    hits = [f"{path}:{line}: {name}" for path, tree in trees.items() for line, name in names(tree) if name in words]
    assert hits == []


def test_the_glossary_has_the_replaced_words():
    contributing = Path(PACKAGE).parent / "CONTRIBUTING.md"
    glossary = contributing.read_text(encoding="utf-8").partition("## Glossary")[2]
    assert REPLACED <= set(re.findall(r"\w+", glossary))
