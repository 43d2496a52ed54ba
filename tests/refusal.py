"""Refusals of the package and of its commands: one line, whose parts a test names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from conftest import run_here

from fairseq_rpe.core import UserError


@contextlib.contextmanager
def refused(parts: str) -> Iterator[None]:
    """A ``UserError`` of one line that matches a regular expression."""
    with pytest.raises(UserError, match=parts) as caught:
        yield
    assert "\n" not in str(caught.value)


def refusal(command: str, *argv: object) -> str:
    """Run a command that must fail with one line on standard error and nothing on standard output: returns the line."""
    done = run_here(command, *map(str, argv), ok=False)
    assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr
