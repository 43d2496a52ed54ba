"""The shared words: errors, spec strings, registry, positions and bias forms."""

from .errors import UserError
from .forms import Dense, Form, Pair, Toeplitz, block, lower
from .positions import Positions
from .registry import Registry
from .spec import Option, canonical, configure, option, options_of, parse

__all__ = [
    "Dense", "Form", "Option", "Pair", "Positions", "Registry", "Toeplitz", "UserError",
    "block", "canonical", "configure", "lower", "option", "options_of", "parse",
]
