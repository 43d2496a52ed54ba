"""What the verdicts on its layers say about a model whose layers have different encodings."""

from collections.abc import Sequence

from fairseq_rpe.analysis.convergence import HeadVerdict
from fairseq_rpe.analysis.convergence_test import CONVERGES, DEPENDS, DIVERGES, UNDECIDED
from fairseq_rpe.core.layer_pattern import format_layers
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.encodings.window import Window

_WORST_FIRST = (DIVERGES, UNDECIDED, DEPENDS)


def stack_decision(decisions: Sequence[str]) -> str:
    """Return the verdict on a stack: it converges if all its heads do, otherwise it is the worst of theirs."""
    return next((decision for decision in _WORST_FIRST if decision in decisions), CONVERGES)


def visible_keys(encoding: Encoding) -> int | None:
    """Return the number of nearest keys outside of which a query sees none, or None if there is no such number.

    A block of N positions hides all keys at a distance of N or more, as a window of N does.
    """
    options = encoding.attention_options
    own_window = encoding.config.window if isinstance(encoding, Window) else None
    return options.local or options.block or own_window


def visible_tokens(encodings: LayerEncodings) -> int | None:
    """Return the number of tokens that the output at a position can depend on, or None if there is no bound.

    A layer whose queries see the nearest w keys passes information on by at most w - 1 tokens. With windows w_l of the
    layers, the output depends on at most 1 + Σ_l (w_l - 1) tokens, whatever the biases are. Blocks of the same size in
    all layers pass nothing on from block to block, so the output depends on at most one block.
    """
    layers = [encodings.layer(layer) for layer in range(len(encodings.index))]
    windows = [window for layer in layers if (window := visible_keys(layer)) is not None]
    if len(windows) < len(layers):
        return None
    blocks = {layer.attention_options.block for layer in layers}
    if len(blocks) == 1 and 0 not in blocks:
        return blocks.pop()
    return 1 + sum(window - 1 for window in windows)


def summarise_stack(encodings: LayerEncodings, verdicts: Sequence[Sequence[HeadVerdict]]) -> list[str]:
    """Return lines on a model: its verdict, with the layers that decide it, and its finite reach, if it has one.

    Args:
        encodings: Encodings of the layers.
        verdicts: Verdicts on the heads of each instance.
    """
    by_instance = [stack_decision([head.decision for head in heads]) for heads in verdicts]
    decision = stack_decision(by_instance)
    lines = []
    if encodings.is_mixed:
        layers = [layer for layer, instance in enumerate(encodings.index) if by_instance[instance] == decision]
        where = "every layer does" if decision == CONVERGES else f"layers {format_layers(layers)}"
        lines.append(f"all {len(encodings.index)} layers together: {decision}, {where}")
    if len(encodings.index) > 1 and (tokens := visible_tokens(encodings)) is not None:
        lines.append(f"all {len(encodings.index)} layers are local: an output depends on at most {tokens} tokens")
    return lines
