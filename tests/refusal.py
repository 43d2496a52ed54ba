"""Checks that the package or one of its commands refuses something with an error of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from conftest import run_here

from fairseq_rpe.core import UserError


@contextlib.contextmanager
def refused(parts: str) -> Iterator[None]:
    """Expect that the block raises a ``UserError`` of one line that matches a regular expression."""
    with pytest.raises(UserError, match=parts) as caught:
        yield
    assert "\n" not in str(caught.value)


def refusal(command: str, *argv: object) -> str:
    """Run a command that must fail with one line on standard error and no other output, and return the line."""
    done = run_here(command, *map(str, argv), ok=False)
    assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr
