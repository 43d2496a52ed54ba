"""Names and tensors of transformers' language models and of the decoder, in both directions.

The table :data:`MODULES` has a module of transformers for each module of the decoder, by architecture. A
:class:`WeightMap` of one model tells how each tensor of the one side is computed from tensors of the other side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms

Shape = tuple[int, ...]
EMBEDDING, OUTPUT = "embed_tokens.weight", "output_projection.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FFN = ("fc1", "fc_gate", "fc2")

# module of the decoder -> module of transformers, both without the prefix of a layer; None: transformers has none.
# Several modules of the decoder that are one of transformers are separated by spaces.
_ENDS = {"embed_tokens": "model.embed_tokens", "layer_norm": "model.norm", "output_projection": "lm_head"}
_ATTENTION = {f"self_attn.{x}_proj": f"self_attn.{x}_proj" for x in "qkv"} | {"self_attn.out_proj": "self_attn.o_proj"}
_QK_NORMS = {"self_attn.q_norm": "self_attn.q_norm", "self_attn.k_norm": "self_attn.k_norm"}
_GATED = {"fc1": "mlp.up_proj", "fc_gate": "mlp.gate_proj", "fc2": "mlp.down_proj"}
_PRE_NORMS = {"self_attn_layer_norm": "input_layernorm", "final_layer_norm": "post_attention_layernorm"}
_SHARED_NORM = {"self_attn_layer_norm final_layer_norm": "input_layernorm"}
_LLAMA = {**_ENDS, **_ATTENTION, **_GATED, **_PRE_NORMS}
_OLMO2 = {
    **_LLAMA,
    **_QK_NORMS,
    "self_attn_layer_norm": "post_attention_layernorm",
    "final_layer_norm": "post_feedforward_layernorm",
}
_GEMMA2 = {
    **_LLAMA,
    "self_attn_output_norm": "post_attention_layernorm",
    "final_layer_norm": "pre_feedforward_layernorm",
    "ffn_output_norm": "post_feedforward_layernorm",
}
MODULES: dict[str, dict[str, str | None]] = {
    "llama": {**_LLAMA},
    "mistral": {**_LLAMA},
    "qwen2": {**_LLAMA},
    "qwen3": {**_LLAMA, **_QK_NORMS},
    "smollm3": {**_LLAMA},
    "olmo": {**_LLAMA, "self_attn_layer_norm": None, "final_layer_norm": None, "layer_norm": None},
    "olmo2": {**_OLMO2},
    "olmo3": {**_OLMO2},
    "gemma": {**_LLAMA},
    "gemma2": {**_GEMMA2},
    "gemma3_text": {**_GEMMA2, **_QK_NORMS},
    "starcoder2": {**_ENDS, **_ATTENTION, **_PRE_NORMS, "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"},
    "stablelm": {**_LLAMA},
    "cohere2": {**_ENDS, **_ATTENTION, **_GATED, **_SHARED_NORM},
    "gpt_neox": {
        "embed_tokens": "gpt_neox.embed_in",
        "layer_norm": "gpt_neox.final_layer_norm",
        "output_projection": "embed_out",  # in files; transformers 5 has another name in memory
        " ".join(QKV): "attention.query_key_value",
        "self_attn.out_proj": "attention.dense",
        "fc1": "mlp.dense_h_to_4h",
        "fc2": "mlp.dense_4h_to_h",
        **_PRE_NORMS,
    },
}
_LAYERS = {"gpt_neox": "gpt_neox.layers"}  # module of the layers, elsewhere model.layers
_OWN_LAYER = "layers."


class Transform(Protocol):
    """How tensors of the decoder are computed from one tensor of transformers, and the other way round."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        """Return the shape of transformers' tensor for shapes of the decoder's tensors."""

    def to_ours(self, theirs: Tensor) -> list[Tensor]:
        """Return the decoder's tensors."""

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        """Return transformers' tensor.

        Raises:
            ValueError: the tensors cannot be expressed.
        """


@dataclass(frozen=True)
class Multiples:
    """The decoder's tensors are multiples of transformers' tensor; with a factor of 1 they have the same bits.

    Attributes:
        factors: factor of each tensor.
        offset: number that is added before: 1 for the norms of Gemma, which multiply by 1 + w.
    """

    factors: tuple[float, ...] = (1.0,)
    offset: float = 0.0

    def shape(self, ours: Sequence[Shape]) -> Shape:
        """Return the common shape."""
        return ours[0]

    def to_ours(self, theirs: Tensor) -> list[Tensor]:
        """Return each multiple; one that is no copy is in float32 at least."""
        return [self._multiply(theirs, factor) for factor in self.factors]

    def _multiply(self, theirs: Tensor, factor: float) -> Tensor:
        if factor == 1 and not self.offset:
            return theirs
        return (theirs.to(torch.promote_types(theirs.dtype, torch.float32)) + self.offset) * factor

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which all of ``ours`` are multiples.

        Raises:
            ValueError: there is no such tensor.
        """
        first, factor = ours[0], self.factors[0]
        theirs = first if factor == 1 and not self.offset else first / factor - self.offset
        for other, expected in zip(ours[1:], self.to_ours(theirs)[1:], strict=True):
            if not torch.equal(other, expected):
                raise ValueError("differ, and this architecture has one tensor for them")
        return theirs


@dataclass(frozen=True)
class Constant:
    """The decoder has a tensor of one value where transformers has none."""

    value: float

    def to_ours(self, shape: Shape) -> Tensor:
        """Return the tensor in float32."""
        return torch.full(shape, self.value)

    def check(self, ours: Tensor) -> None:
        """Raise ValueError if a tensor has other values."""
        if not bool((ours == self.value).all()):
            raise ValueError(f"are not all {self.value:g}, and this architecture has no such tensor")


@dataclass(frozen=True)
class FusedHeads:
    """GPT-NeoX's query_key_value (H·3·D, …): query, key and value of head 0, then those of head 1, and so on.

    Attributes:
        heads: number of heads H.
    """

    heads: int

    def shape(self, ours: Sequence[Shape]) -> Shape:
        """Return the shape of the fused tensor."""
        return (sum(shape[0] for shape in ours), *ours[0][1:])

    def to_ours(self, theirs: Tensor) -> list[Tensor]:
        """Return the tensors (H·D, …) of queries, keys and values."""
        by_head = theirs.unflatten(0, (self.heads, 3, -1))  # (H, 3, D, …)
        return [by_head[:, i].flatten(0, 1) for i in range(3)]

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the fused tensor."""
        return torch.stack([x.unflatten(0, (self.heads, -1)) for x in ours], 1).flatten(0, 2)


@dataclass(frozen=True)
class Step:
    """One tensor of transformers and the tensors of the decoder that it determines.

    Attributes:
        theirs: name in transformers.
        ours: names in the decoder.
        transform: how the tensors are computed from each other.
    """

    theirs: str
    ours: tuple[str, ...]
    transform: Multiples | FusedHeads


@dataclass(frozen=True)
class WeightMap:
    """The tensors of one model in transformers and in the decoder.

    Attributes:
        architecture: ``model_type`` in transformers, a key of :data:`MODULES`.
        config: sizes and blocks of the decoder.
        biased: modules of the decoder, without the prefix of a layer, that have a bias in transformers.
        modules: modules as in :data:`MODULES`.
        factors: factors of the tensors of a module of the decoder, by its name without the prefix of a layer.
        norm_offset: 1 if norms multiply by 1 + w in transformers.
        token_ids: id in transformers of each token of the decoder; None: the same ids.
    """

    architecture: str
    config: DecoderConfig
    biased: frozenset[str]
    modules: Mapping[str, str | None]
    factors: Mapping[str, float] = field(default_factory=dict)
    norm_offset: float = 0.0
    token_ids: Sequence[int] | None = None

    @cached_property
    def own_shapes(self) -> dict[str, Shape]:
        """Shapes of the decoder's tensors by name; tied ones once."""
        config = self.config
        with torch.device("meta"):
            encodings = build_for_model("nope", config.heads, config.width, config.layers)
            model = Decoder(config, encodings, PositionTransforms("identity", "", 1, 1, 0))
        return {name: tuple(x.shape) for name, x in model.named_parameters() if not name.startswith("encodings.")}

    @cached_property
    def constants(self) -> dict[str, Constant]:
        """Tensors of the decoder that transformers lacks: biases of 0, and weights of 1 of norms without a weight."""
        constants = {}
        for name in self.own_shapes:
            module, _, kind = _without_layer(name).rpartition(".")
            if kind == "bias" and module not in self.biased:
                constants[name] = Constant(0.0)
            elif module in self.modules and self.modules[module] is None:
                constants[name] = Constant(1.0)
        return constants

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every tensor of transformers; each tensor of the decoder is in one of them or in ``constants``."""
        groups = {ours: names for names in self.modules for ours in names.split()}
        steps: dict[str, Step] = {}
        for name in self.own_shapes:
            if name in self.constants:
                continue
            prefix, local = _split_layer(name)
            module, _, kind = local.rpartition(".")
            group = groups[module]
            layer = prefix.replace(_OWN_LAYER, _LAYERS.get(self.architecture, "model.layers") + ".")
            theirs = f"{layer}{self.modules[group]}.{kind}"
            ours = tuple(f"{prefix}{own_module}.{kind}" for own_module in group.split())
            steps[theirs] = Step(theirs, ours, self._transform(group))
        return tuple(steps.values())

    def _transform(self, group: str) -> Multiples | FusedHeads:
        modules = group.split()
        if tuple(modules) == QKV:
            return FusedHeads(self.config.heads)
        factors = tuple(self.factors.get(module, 1.0) for module in modules)
        return Multiples(factors, self.norm_offset if modules[0].endswith("norm") else 0.0)

    def their_shapes(self) -> dict[str, Shape]:
        """Return the shapes of transformers' tensors by name."""
        shapes = self.own_shapes
        return {step.theirs: step.transform.shape([shapes[name] for name in step.ours]) for step in self.steps}

    def check(self, shapes: Mapping[str, Shape], where: object) -> None:
        """Check that tensors are those of this model, before any of them is read.

        Args:
            shapes: shapes by name.
            where: file or folder of the tensors, for the message.

        Raises:
            UserError: a tensor is missing, has another shape, or has no place in the decoder.
        """
        expected = self.their_shapes()
        for name, shape in expected.items():
            if name not in shapes:
                raise UserError(
                    f"{where} has no tensor {name}, which a {self.architecture} of its config has: take both from one "
                    "model"
                )
            if tuple(shapes[name]) != shape:
                raise UserError(
                    f"{where}: {name} has the shape {tuple(shapes[name])}, and its config means {shape}: take both "
                    "from one model"
                )
        for name in shapes:
            if name not in expected:
                raise UserError(
                    f"{where} has the tensor {name}, which a {self.architecture} of its config does not have: take "
                    "both from one model"
                )

    def to_ours(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the decoder.

        Args:
            read: returns a tensor of transformers by its name; it is called once for each.
        """
        for step in self.steps:
            for name, value in zip(step.ours, step.transform.to_ours(read(step.theirs)), strict=True):
                yield name, self._order_tokens(name, value)
        for name, constant in self.constants.items():
            yield name, constant.to_ours(self.own_shapes[name])

    def _order_tokens(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor with a row per token in the order of the decoder's ids."""
        if self.token_ids is None or name not in (EMBEDDING, OUTPUT):
            return value.contiguous()
        return value[torch.tensor(self.token_ids)]

    def to_theirs(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of transformers by name.

        Args:
            weights: tensors of the decoder by name, without those of its encodings.

        Raises:
            UserError: this architecture cannot have such tensors.
        """
        tensors = {}
        for step in self.steps:
            ours = [self._restore_tokens(name, weights[name]) for name in step.ours]
            try:
                tensors[step.theirs] = step.transform.to_theirs(ours).contiguous()
            except ValueError as error:
                raise UserError(f"{' and '.join(step.ours)} {error}: leave --as out") from None
        for name, constant in self.constants.items():
            try:
                constant.check(weights[name])
            except ValueError as error:
                raise UserError(f"the values of {name} {error}: leave --as out") from None
        return tensors

    def _restore_tokens(self, name: str, value: Tensor) -> Tensor:
        if self.token_ids is None or name not in (EMBEDDING, OUTPUT):
            return value
        restored = torch.empty_like(value)
        restored[torch.tensor(self.token_ids)] = value
        return restored


def _split_layer(name: str) -> tuple[str, str]:
    """Return the prefix of the layer in the name of a tensor, such as ``layers.3.``, and the rest."""
    if not name.startswith(_OWN_LAYER):
        return "", name
    _, index, local = name.split(".", 2)
    return f"{_OWN_LAYER}{index}.", local


def _without_layer(name: str) -> str:
    return _split_layer(name)[1]
