"""The shared words: errors, spec strings, registry, positions, bias forms and log-weights.

Names are looked up when they are used: the command line needs the errors and specs without waiting for torch.
"""

import importlib
from typing import Any

_HOME = {
    "Curve": "forms",
    "Dense": "forms",
    "Form": "forms",
    "Pair": "forms",
    "Pieces": "forms",
    "Pointwise": "forms",
    "Toeplitz": "forms",
    "block": "forms",
    "lower": "forms",
    "LogWeight": "logweight",
    "exact": "logweight",
    "Option": "spec",
    "canonical": "spec",
    "configure": "spec",
    "option": "spec",
    "options_of": "spec",
    "parse": "spec",
    "Positions": "positions",
    "Description": "registry",
    "Registry": "registry",
    "UserError": "errors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
