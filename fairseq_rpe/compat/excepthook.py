"""One line for a user's mistake."""

import os
import sys
from typing import Any

from fairseq_rpe.compat.monkeypatch import replaces
from fairseq_rpe.core.errors import DEBUG, UserError, told


@replaces(sys, "excepthook")
def one_line_errors(original: Any, kind: Any, error: BaseException, trace: Any) -> None:
    """Users of fairseq-train would see a traceback of fairseq's internals for a mistyped flag: show the line alone.

    fairseq wraps some failures in an exception of its own, so the one being handled counts too.
    """
    ours = next((e for e in (error, error.__context__) if isinstance(e, UserError)), error)
    said = told(ours)
    if said is None or DEBUG in os.environ:
        original(kind, error, trace)
    if said is not None:
        print(f"error: {said}", file=sys.stderr)
