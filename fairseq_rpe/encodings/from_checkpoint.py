"""Restores trained encodings from a checkpoint, without allocating more memory than its weights justify."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fairseq_rpe.checkpoints.checkpoint import ENCODING_PREFIX, Checkpoint, dtype_mismatch
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import LayerGroup, is_pattern
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import Encoding
from fairseq_rpe.encodings.model import LayerEncodings, index_of_layers, instance_groups, match_weights

# functions that allocate tensors; _SizeLimit checks their sizes
_FACTORIES = {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn}
_FACTORIES |= {torch.zeros}
_SCRATCH = 2**20  # elements that an encoding may allocate besides its parameters


def restore_encodings(state: Checkpoint) -> LayerEncodings:
    """Restore the encodings of a checkpoint of this plugin.

    Args:
        state: settings and weights of a checkpoint that this plugin saved.

    Returns:
        The encodings of its layers, in evaluation mode.

    Raises:
        UserError: the spec is not valid, or the weights do not belong to that encoding.
    """
    heads, width = (state.integer_setting(key) for key in ("decoder_attention_heads", "decoder_embed_dim"))
    build_encoding = partial(
        build, heads=heads, width=width, length=state.train_length(), head_width=state.head_width()
    )
    instances, weights = trained_instances(state), state.encoding_weights
    # encodings without parameters may have no weights
    values = [*weights, *({} for _ in instances[len(weights) :])]
    restored = [
        _restore(state, partial(build_encoding, group.spec), group.spec, tensors)
        for group, tensors in zip(instances, values, strict=True)
    ]
    return LayerEncodings.from_groups(restored, instances)


def trained_instances(state: Checkpoint) -> tuple[LayerGroup, ...]:
    """Return the specs and layers of a checkpoint's encodings.

    Args:
        state: settings and weights of a checkpoint that this plugin saved.

    Raises:
        UserError: the spec is not valid, or there are weights of more encodings.
    """
    spec, weights = str(state.model["rpe"]), state.encoding_weights
    if not is_pattern(spec):
        layers = state.model.get("decoder_layers")
        count = layers if isinstance(layers, int) else len(weights) or 1
        if len(weights) > 1:
            return tuple(LayerGroup(spec, (layer,)) for layer in range(count))
        return (LayerGroup(spec, tuple(range(count))),)
    layers = state.integer_setting("decoder_layers")
    if layers > len(state.weights):  # each layer has weights, so a damaged checkpoint names too many layers
        raise _other_parameters(state, spec, f"{len(state.weights)} tensors for {layers} layers")
    instances = instance_groups(spec, layers, str(state.model.get("rpe_share", "auto")))
    if len(weights) > len(instances):
        raise _other_parameters(state, spec, f"{len(weights)} encodings")
    return instances


def match_checkpoint_weights(state: Checkpoint, index: Sequence[int]) -> list[Mapping[str, Tensor]]:
    """Return the weights of each instance of a model that is trained further with other encodings.

    Args:
        state: settings and weights of a checkpoint that this plugin saved.
        index: instance of each layer of the model.

    Returns:
        State dicts of the instances: those of the checkpoint's encodings in the same layers.

    Raises:
        UserError: the spec of the checkpoint is not valid, the model has another number of layers, or layers with
            weights of their own would share an encoding.
    """
    trained = index_of_layers(trained_instances(state))
    if len(trained) != len(index):
        raise UserError(
            f"{state.path} has {len(trained)} layers, and the new training builds {len(index)}: give the --arch and "
            f"the flags of fairseq-train that it was trained with, such as --decoder-layers {len(trained)}"
        )
    return match_weights(state.encoding_weights, trained, index)


def rename_encoding_weights(
    state: Checkpoint, spec: str, weights: Mapping[str, Tensor], share: str | None = None
) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint by the names that they have in a model with other encodings.

    The number in a name is that of the encoding's instance. With a pattern of layers, an encoding without parameters
    that replaces another one can change the numbers of the following instances. Another sharing changes them too.

    Args:
        state: settings and weights of a checkpoint that this plugin saved.
        spec: spec of the encoding that replaces the checkpoint's, or a pattern of layers.
        weights: weights of the model by the names in the checkpoint.
        share: how the layers of the model share an encoding; None: as in the checkpoint.

    Raises:
        UserError: ``spec`` is not valid, or layers with weights of their own would share an encoding.
    """
    if share is None and not is_pattern(spec) and not is_pattern(str(state.model["rpe"])):
        return weights
    trained = index_of_layers(trained_instances(state))
    instances = instance_groups(spec, len(trained), share or str(state.model.get("rpe_share", "auto")))
    matched = match_weights(state.encoding_weights, trained, index_of_layers(instances))
    others = {name: value for name, value in weights.items() if not name.startswith(ENCODING_PREFIX)}
    return others | {
        f"{ENCODING_PREFIX}{instance}.{name}": value
        for instance, values in enumerate(matched)
        for name, value in values.items()
    }


def _other_parameters(state: Checkpoint, spec: str, details: str | None) -> UserError:
    """Return the error for weights that do not belong to the encoding ``spec``."""
    what = f" ({details})" if details else ""
    return UserError(f"{state.path} has other parameters than '{spec}'{what}: train it again")


def _restore(
    state: Checkpoint, build_encoding: Callable[[], Encoding], spec: str, values: Mapping[str, Tensor]
) -> Encoding:
    """Build the encoding ``spec`` and load its weights ``values``.

    A damaged or hostile checkpoint may name options that need more memory than its weights have, so building stops at
    the first tensor that is much larger than all weights.
    """
    mismatch: str | None
    with _SizeLimit(sum(t.numel() for t in values.values()) + _SCRATCH) as limit:
        try:
            encoding = build_encoding()
        except _TooLarge:
            mismatch = f"more than {limit.max_elements} elements"
        else:
            mismatch = dtype_mismatch(encoding.state_dict(), values)
    try:
        if mismatch is None:
            encoding.load_state_dict(dict(values))
            return encoding.eval()
    except RuntimeError:  # names or shapes differ
        pass
    raise _other_parameters(state, spec, mismatch)


class _TooLarge(Exception):
    """A tensor would exceed the size limit."""


class _SizeLimit(TorchFunctionMode):
    """Context in which creating a tensor of more than ``max_elements`` elements raises ``_TooLarge``."""

    def __init__(self, max_elements: int) -> None:
        super().__init__()
        self.max_elements = max_elements

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            # on device "meta" the call allocates nothing, and these three arguments do not belong to that device
            shape = {k: v for k, v in kwargs.items() if k not in ("generator", "out", "pin_memory")}
            if func(*args, **{**shape, "device": "meta"}).numel() > self.max_elements:
                raise _TooLarge
        return func(*args, **kwargs)
