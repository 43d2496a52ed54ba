"""Faster imports: scikit-learn, SciPy and torch's compiler load on first use; no advice about tensorboardX."""

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
# imported by fairseq's criterion sentence_prediction and task audio_classification for their scores
_NAMES = ("sklearn", "sklearn.metrics", "scipy.stats")
# it advises to install tensorboardX on import, which only speech needs; torch has a writer of its own
_SPEECH = "fairseq.tasks.text_to_speech"


class _LazyModule(ModuleType):
    """Stands for a module of functions and imports it when one of them is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(import_module(self.__name__), name)(*args, **kwargs)


def _no_advice(record: logging.LogRecord) -> bool:
    return "install tensorboardX" not in record.getMessage()


def _import_fairseq() -> None:
    """Import fairseq with lazy modules in ``sys.modules``; later imports get the real modules."""
    lazy_modules = {name: _LazyModule(name) for name in _NAMES if name not in sys.modules}
    for name, module in lazy_modules.items():
        parent, _, child = name.rpartition(".")
        if parent in lazy_modules:
            setattr(lazy_modules[parent], child, module)
        elif not parent:
            module.__spec__ = PathFinder.find_spec(name)  # read by others to find out whether it is installed
    sys.modules.update(lazy_modules)
    advice = logging.getLogger(_SPEECH)
    advice.addFilter(_no_advice)
    try:
        import_module("fairseq")
    finally:
        advice.removeFilter(_no_advice)
        for name in lazy_modules:
            del sys.modules[name]


class _LazyCompiler(ModuleType):
    """Stands for ``torch._dynamo``, which optimizers and custom operators call to exclude their functions.

    Without it every training would load the compiler for these calls. Any other attribute loads the real compiler.
    """

    def disable(self, function: Callable[..., Any] | None = None, *how: Any, **named: Any) -> Any:
        if function is not None and named == {"wrapping": False}:  # as torch itself calls it
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
    sys.modules[_COMPILER] = torch._dynamo = _LazyCompiler(_COMPILER)
