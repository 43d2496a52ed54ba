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
    """Replaces a module of functions, and imports the real module when a function is called."""

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
            # Other packages read it to find out whether the module is installed.
            module.__spec__ = PathFinder.find_spec(name)
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
    """Replaces ``torch._dynamo``, which optimizers and custom operators call to exclude their functions.

    Without the replacement every training would load the compiler for these calls. Any other attribute loads the real
    compiler.
    """

    def disable(self, function: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Any:
        """Return the function as it is; arguments that torch itself does not use are for the real compiler."""
        if function is not None and options == {"wrapping": False}:
            return function
        return self.__getattr__("disable")(function, *args, **options)

    def __getattr__(self, name: str) -> Any:
        # Python reads __path__ to import a submodule, which needs the real package.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]  # so that import_module loads the real compiler
        return getattr(import_module(_COMPILER), name)


if "fairseq" not in sys.modules:
    _import_fairseq()
if _COMPILER not in sys.modules:
    sys.modules[_COMPILER] = torch._dynamo = _LazyCompiler(_COMPILER)
