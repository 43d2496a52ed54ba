"""Refusals of this package: one line, whose parts a test names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from fairseq_rpe.core import UserError


@contextlib.contextmanager
def refused(parts: str) -> Iterator[None]:
    """A ``UserError`` of one line that matches a regular expression."""
    with pytest.raises(UserError, match=parts) as caught:
        yield
    assert "\n" not in str(caught.value)
