"""Positional encodings for length extrapolation, for PyTorch and as a fairseq plugin.

``attend``, ``RelativeAttention`` and ``build`` work in any torch program; they are loaded when they are first used, so
that importing this package needs no torch. ``--user-dir`` imports it too: with fairseq loaded, that registers the
models, criterions and encodings with fairseq; ``import fairseq_rpe.models`` registers explicitly.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairseq_rpe.attention.functional import RelativeAttention, attend
    from fairseq_rpe.encodings import build

__version__ = "0.1.0"
__all__ = ["RelativeAttention", "attend", "build"]

_HOME = {"RelativeAttention": "attention.functional", "attend": "attention.functional", "build": "encodings"}

if sys.modules.get("fairseq") is not None:
    from fairseq_rpe import models  # noqa: F401


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
