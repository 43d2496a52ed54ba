"""Prints user errors as one line instead of a traceback."""

import os
import sys
from typing import Any

from fairseq_rpe.compat.monkeypatch import patch
from fairseq_rpe.core.errors import DEBUG_VARIABLE, UserError, user_message


@patch(sys, "excepthook")
def print_one_line_error(original: Any, kind: Any, error: BaseException, trace: Any) -> None:
    """Print one line for a UserError; fairseq-train would print a traceback of its internals for a mistyped flag.

    fairseq wraps some errors in an exception of its own, so the context of the exception counts too.
    """
    cause = next((e for e in (error, error.__context__) if isinstance(e, UserError)), error)
    message = user_message(cause)
    if message is None or DEBUG_VARIABLE in os.environ:
        original(kind, error, trace)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
