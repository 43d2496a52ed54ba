"""Registers the model type ``fairseq_rpe`` with transformers' Auto classes, as soon as these are imported.

The package is imported without transformers and without torch. Therefore :func:`register_on_import` adds a finder to
``sys.meta_path`` that waits for the modules with the Auto classes.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# module of transformers with an Auto class -> module of this package that registers with it
_REGISTERING = {
    "transformers.models.auto.configuration_auto": "fairseq_rpe.adapters.pretrained_config",
    "transformers.models.auto.modeling_auto": "fairseq_rpe.adapters.pretrained",
}


class _RegisteringLoader(Loader):
    """Loads a module of transformers and then imports the module that registers with it."""

    def __init__(self, loader: Any, registering: str) -> None:
        self._loader, self._registering = loader, registering

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(self._registering)

    def __getattr__(self, name: str) -> Any:  # e.g. get_source, which inspect calls
        return getattr(self._loader, name)


class _AutoClassFinder(MetaPathFinder):
    """Finds the modules with Auto classes by the other finders, and adds the registration to their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        registering = _REGISTERING.get(fullname)
        if registering is None:
            return None
        for finder in sys.meta_path:
            is_other = not isinstance(finder, _AutoClassFinder)
            spec = finder.find_spec(fullname, path, target) if is_other else None
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader, registering)
                return spec
        return None


def _register(registering: str) -> None:
    """Import a module that registers; a failure does not make transformers unusable."""
    try:
        importlib.import_module(registering)
    except Exception as error:
        warnings.warn(f"fairseq_rpe cannot register its models with transformers: {error}", stacklevel=2)


def register_on_import() -> None:
    """Register now if transformers' Auto classes are imported, and else when they are imported."""
    for auto, registering in _REGISTERING.items():
        if auto in sys.modules:
            _register(registering)
    if not any(isinstance(finder, _AutoClassFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoClassFinder())
