"""The shared words: errors, spec strings, registry, positions, bias forms and log-weights.

Names are looked up when they are used: the command line needs the errors and specs without waiting for torch.
"""

import importlib
from typing import Any

_NAMES = {
    "errors": ("UserError",),
    "bias": (
        *(
            "KeyTableBias",
            "QueryTableBias",
            "ContentBias",
            "ScaledDistanceBias",
            "DenseBias",
            "Bias",
            "TokenBias",
            "PairBias",
            "PiecewiseLinear",
            "PointwiseBias",
            "Positions",
        ),
        *("QueryKeyTableBias", "RelativeValues", "SumBias", "ToeplitzBias", "added", "block", "part"),
    ),
    "log_bias": ("LogBias", "exact"),
    "rotation_regions": ("RotationRegion",),
    "registry": ("Description", "Registry"),
    "spec": ("Option", "canonical", "configure", "option", "options_of", "parse"),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
