"""Options that every encoding has: which keys a query sees, and what happens to the content logits.

A spec may state them for any encoding, such as ``rope:local=512`` or ``nope:query_scale=ssmax``. Attention applies them
in one order: content logit, with the query scaled by ``query_scale``; ``softcap``; + bias; visibility (causal,
``local``, ``block``); ``null_logit``; softmax.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import configure, option

NULL_LOGITS = ("none", "zero", "learned")


class QueryScaleMethod(NamedTuple):
    """A value of the option ``query_scale``.

    Attributes:
        formula: The factor of the query at position i, in one line.
        value: Default of ``query_scale_value``, or None if it is derived from the training length or not used.
        uses_value: Whether it uses ``query_scale_value``.
        uses_interval: Whether it uses ``query_scale_interval``, which defaults to the training length.
        is_learned: Whether ``query_scale_value`` is the initial value of one parameter per head.
    """

    formula: str
    value: float | None = None
    uses_value: bool = True
    uses_interval: bool = False
    is_learned: bool = False


# The query at position i sees n keys. a is the option query_scale_value, and F is query_scale_interval.
QUERY_SCALES = {
    "none": QueryScaleMethod("1", uses_value=False),
    "constant": QueryScaleMethod("a", 1.0),
    "head": QueryScaleMethod("a_h, learned", 1.6, is_learned=True),
    "ssmax": QueryScaleMethod("a_h·ln n, a_h learned", is_learned=True),
    "logn": QueryScaleMethod("max(1, ln n / ln F)", uses_value=False, uses_interval=True),
    "llama4": QueryScaleMethod("1 + a·ln(1 + floor((i + 1) / F))", 0.1, uses_interval=True),
    "ministral": QueryScaleMethod("1 + a·ln(1 + floor(i / F))", 0.1, uses_interval=True),
    "inkling": QueryScaleMethod("1 + a·ln(max(1, (i + 1) / F))", 0.1, uses_interval=True),
}


@dataclass(frozen=True)
class AttentionOptions:
    """Options of every encoding; the defaults change nothing."""

    local: int = option(0, "window: number of nearest keys that a query sees, itself included; 0: all", minimum=0)
    block: int = option(
        0, "size of the blocks of positions outside of which a query sees no key; 0: no blocks", minimum=0
    )
    query_scale: str = option("none", "factor of the queries, by their position", choices=tuple(QUERY_SCALES))
    query_scale_value: float = option(0.0, "factor or initial factor a of query_scale; 0: its own default", minimum=0)
    query_scale_interval: int = option(0, "interval F of query_scale, in tokens; 0: the training length", minimum=0)
    softcap: float = option(0.0, "c of c·tanh(s/c), applied to the content logit s; 0: none", minimum=0)
    null_logit: str = option(
        "none", "logit of a key without a value, which every query sees besides its keys", choices=NULL_LOGITS
    )

    @property
    def is_default(self) -> bool:
        """Whether no option differs from its default."""
        return self == AttentionOptions()

    @property
    def hides_keys(self) -> bool:
        """Whether a query sees only keys that are near it or in its block."""
        return bool(self.local or self.block)

    @property
    def is_learned(self) -> bool:
        """Whether the options have learned parameters."""
        return QUERY_SCALES[self.query_scale].is_learned or self.null_logit == "learned"


OPTION_NAMES = tuple(f.name for f in dataclasses.fields(AttentionOptions))


class _HasAttentionOptions:
    """Marks configs that :func:`extend_config` has extended."""


def attention_options(config: Any) -> AttentionOptions:
    """Return the attention options of a config; the defaults if it has none."""
    if not isinstance(config, _HasAttentionOptions):
        return AttentionOptions()
    return AttentionOptions(**{name: getattr(config, name) for name in OPTION_NAMES})


@functools.cache
def extend_config(config: type) -> type:
    """Return a subclass of an encoding's ``Config`` that also has the fields of :class:`AttentionOptions`.

    Raises:
        UserError: An option of the encoding has the name of an attention option.
    """
    for f in dataclasses.fields(config):
        if f.name in OPTION_NAMES:
            raise UserError(
                f"{config.__qualname__} has an option '{f.name}' of its own, which is an option of every encoding: "
                "rename it"
            )
    # a field belongs to its class, so the new class needs copies
    copies = [
        (f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata))
        for f in dataclasses.fields(AttentionOptions)
    ]
    namespace = {"__module__": __name__, "__reduce__": _reduce_config}
    bases = (config, _HasAttentionOptions)
    return dataclasses.make_dataclass(config.__name__, copies, bases=bases, frozen=True, namespace=namespace)


def _reduce_config(config: Any) -> tuple[Any, ...]:
    """Return how to restore a config of an extended class, which pickle cannot find by its name."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return _restore_config, (type(config).__bases__[0], values)


def _restore_config(config: type, values: dict[str, Any]) -> Any:
    """Return an instance of the extended class of ``config``."""
    return extend_config(config)(**values)


def check_attention_options(name: str, options: AttentionOptions) -> None:
    """Check that the options can be used together.

    Args:
        name: Name of the encoding, for messages.
        options: The options.

    Raises:
        UserError: Two options exclude each other, or a number belongs to an option that is not set.
    """
    method = QUERY_SCALES[options.query_scale]
    if options.local and options.block:
        raise UserError(f"'{name}': local and block are two ways to hide far keys: give one of them")
    if options.query_scale_value and not method.uses_value:
        raise UserError(f"'{name}': query_scale={options.query_scale} has no query_scale_value: leave it out")
    if options.query_scale_interval and not method.uses_interval:
        raise UserError(f"'{name}': query_scale={options.query_scale} has no query_scale_interval: leave it out")


def configure_encoding(config: type, name: str, options: dict[str, str]) -> Any:
    """Build the config of an encoding, with its attention options, from options as ``parse`` returns them.

    Args:
        config: ``Config`` of the encoding.
        name: Name in the spec, for messages.
        options: Values by key, as text.

    Returns:
        An instance of ``config`` if no attention option is given, else of a subclass that has them.

    Raises:
        UserError: As ``configure``, or two attention options exclude each other.
    """
    if not dataclasses.is_dataclass(config) or not set(OPTION_NAMES) & set(options):
        return configure(config, name, options, other_options=OPTION_NAMES)
    configured = configure(extend_config(config), name, options)
    check_attention_options(name, attention_options(configured))
    return configured
