"""One line for a user's mistake."""

from __future__ import annotations

import sys
import types

from ..core import UserError


def one_line_errors() -> None:
    """Users of fairseq-train would see a traceback of fairseq's internals for a mistyped flag: show the line alone.

    fairseq wraps some failures in an exception of its own, so the one being handled counts too.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        for candidate in (error, error.__context__):
            if isinstance(candidate, UserError):
                print(f"error: {candidate}", file=sys.stderr)
                return
        previous(kind, error, trace)

    sys.excepthook = hook
