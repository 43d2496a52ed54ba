"""Which position each token gets, by name. ``build("warp:alpha=1/6")(index, lengths, generator).k``.

Two slots use these, one for training and one for evaluation; every encoding that reads positions can follow.
"""

from fairseq_rpe.core.arguments import check_count, check_text
from fairseq_rpe.core.contract import call, is_shipped
from fairseq_rpe.core.spec import option
from fairseq_rpe.positions import cape, clex_sampling, interpolate, pose, randomized, shift, warp  # noqa: F401  (registers)
from fairseq_rpe.positions.base import Transform, TransformedPositions, freeze, freeze_rows, register, registry
from fairseq_rpe.positions.contract import check_contract
from fairseq_rpe.positions.warp import SKEWS

__all__ = [
    "SKEWS",
    "Transform",
    "TransformedPositions",
    "build",
    "describe",
    "freeze",
    "freeze_rows",
    "names",
    "normalise",
    "option",
    "register",
]

names, describe, normalise = registry.names, registry.describe, registry.normalise


def build(spec: str, train_length: int | None = None) -> Transform:
    """Make the transform that ``spec``, ``name`` or ``name:key=value,key=value``, names.

    A transform of the user's own is checked before it is returned, once for its options (see ``contract``).

    Raises UserError: unknown name or option, value out of range or of another type, ``train_length`` (in tokens) needed
    but unknown, or a transform of the user's own that does not keep to what ``Transform`` asks for.
    """
    check_text("the spec of a position transform", spec, "identity")
    check_count("train_length", train_length, optional=True)
    cls, _, config = registry.resolve(spec)
    if is_shipped(cls):
        return cls(config, train_length)
    transform: Transform = call(cls, "setup", cls, config, train_length)
    check_contract(transform)
    return transform
