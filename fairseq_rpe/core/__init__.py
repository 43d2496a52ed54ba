"""Errors, spec strings, the registry, positions and bias types.

Names are imported when they are first used, because the command line needs errors and specs but not torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairseq_rpe.core.bias import (
        Bias,
        ContentBias,
        DenseBias,
        KeyTableBias,
        PairBias,
        PairGateBias,
        PiecewiseLinear,
        PointwiseBias,
        QueryKeyTableBias,
        QueryTableBias,
        RelativeValues,
        ScaledDistanceBias,
        SumBias,
        ToeplitzBias,
        TokenBias,
        add_biases,
    )
    from fairseq_rpe.core.errors import UserError
    from fairseq_rpe.core.log_bias import LogBias, exact_fraction
    from fairseq_rpe.core.positions import Positions
    from fairseq_rpe.core.registry import Description, Registry
    from fairseq_rpe.core.rotation_regions import RotationRegion
    from fairseq_rpe.core.score_product import ScoreProduct, VectorProduct
    from fairseq_rpe.core.spec import Option, canonical, configure, list_options, option, parse

__all__ = [
    "Bias",
    "ContentBias",
    "DenseBias",
    "Description",
    "KeyTableBias",
    "LogBias",
    "Option",
    "PairBias",
    "PairGateBias",
    "PiecewiseLinear",
    "PointwiseBias",
    "Positions",
    "QueryKeyTableBias",
    "QueryTableBias",
    "Registry",
    "RelativeValues",
    "RotationRegion",
    "ScaledDistanceBias",
    "ScoreProduct",
    "SumBias",
    "ToeplitzBias",
    "TokenBias",
    "UserError",
    "VectorProduct",
    "add_biases",
    "canonical",
    "configure",
    "exact_fraction",
    "list_options",
    "option",
    "parse",
]
# module -> public names; all others are in `bias`
_MODULES = {
    "errors": ("UserError",),
    "log_bias": ("LogBias", "exact_fraction"),
    "positions": ("Positions",),
    "registry": ("Description", "Registry"),
    "rotation_regions": ("RotationRegion",),
    "score_product": ("ScoreProduct", "VectorProduct"),
    "spec": ("Option", "canonical", "configure", "option", "list_options", "parse"),
}
_MODULE_OF_NAME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF_NAME.get(name, 'bias')}"), name)
