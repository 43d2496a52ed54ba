"""A quicker start: without scikit-learn, SciPy and torch's compiler until they are used; no advice on tensorboardX."""

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
# What fairseq's criterion sentence_prediction and task audio_classification import for their scores.
_NAMES = ("sklearn", "sklearn.metrics", "scipy.stats")
# It asks for tensorboardX as soon as it is imported, which only speech needs; our runs write with torch's own writer.
_SPEECH = "fairseq.tasks.text_to_speech"


class _Later(ModuleType):
    """In the place of a module of functions: it is imported when one of them is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(import_module(self.__name__), name)(*args, **kwargs)


def _no_advice(record: logging.LogRecord) -> bool:
    return "install tensorboardX" not in record.getMessage()


def _import_fairseq() -> None:
    """Whoever imports them afterwards gets the modules themselves."""
    standing_in = {name: _Later(name) for name in _NAMES if name not in sys.modules}
    for name, module in standing_in.items():
        parent, _, child = name.rpartition(".")
        if parent in standing_in:
            setattr(standing_in[parent], child, module)
        elif not parent:
            module.__spec__ = PathFinder.find_spec(name)  # others ask for it, to learn whether it is installed
    sys.modules.update(standing_in)
    advice = logging.getLogger(_SPEECH)
    advice.addFilter(_no_advice)
    try:
        import_module("fairseq")
    finally:
        advice.removeFilter(_no_advice)
        for name in standing_in:
            del sys.modules[name]


class _Compiler(ModuleType):
    """In the place of ``torch._dynamo``, which optimizers and custom operators ask to leave their functions alone.

    They do so when they are first called, and each training would load the compiler for that. Whoever asks it for
    anything else gets the compiler itself, from then on.
    """

    def disable(self, function: Callable[..., Any] | None = None, *how: Any, **named: Any) -> Any:
        if function is not None and named == {"wrapping": False}:  # as torch itself asks, and nobody else
            return function
        return self.__getattr__("disable")(function, *how, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(import_module(_COMPILER), name)


if "fairseq" not in sys.modules:
    _import_fairseq()
if _COMPILER not in sys.modules:
    sys.modules[_COMPILER] = torch._dynamo = _Compiler(_COMPILER)
