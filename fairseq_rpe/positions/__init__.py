"""Position transforms by name, e.g. ``build("warp:alpha=1/6")(index, lengths, generator).k``.

A transform maps the index of each token to the position that encodings see. A model has one for training and one for
evaluation, and they work with every encoding that reads positions.
"""

from fairseq_rpe.core.arguments import check_count, check_text
from fairseq_rpe.core.contract import call_user_method, is_shipped
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
    """Build a position transform.

    A user's own transform is checked before it is returned, once for each combination of options; see ``contract``.

    Args:
        spec: ``name`` or ``name:key=value,key=value``.
        train_length: training length in tokens, or None if unknown.

    Raises:
        UserError: the name or an option is unknown, a value is out of range or has a wrong type, ``train_length`` is
            needed but unknown, or a user's own transform returns something else than ``Transform`` requires.
    """
    check_text("the spec of a position transform", spec, "identity")
    check_count("train_length", train_length, optional=True)
    cls, _, config = registry.resolve(spec)
    if is_shipped(cls):
        return cls(config, train_length)
    transform: Transform = call_user_method(cls, "setup", cls, config, train_length)
    check_contract(transform)
    return transform
