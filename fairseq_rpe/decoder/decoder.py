"""Causal Transformer language model in plain torch, with any positional encoding and any attention backend."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention import AttentionPlan, check_eps, choose_backend
from fairseq_rpe.attention.forward import (
    build_plan,
    check_separable,
    needs_end_mask,
    positions_from_documents,
    positions_from_padding,
)
from fairseq_rpe.core.bias import ToeplitzBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.decoder.blocks import DecoderLayer, initialize, make_norm
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.dropout import Dropout
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.positions.position_transforms import PositionTransforms


class Decoder(nn.Module):
    """Embedding, layers and output projection of a language model.

    The residual stream is (n, B, C) as in fairseq: the order of its rows decides how sums over tokens are rounded, so
    another order would change trained models in their last digits. Parameters have fairseq's names and order, too.

    Args:
        config: sizes and blocks.
        encodings: encodings of the layers.
        position_transforms: transforms of positions in training and evaluation.
        embed_tokens: embedding of the tokens; None builds one.
        layers: empty list of modules to which the layers are added; None for one that always runs all of them.
        quant_noise: linear layer without a bias that is applied to the scaled embeddings, or None.
        others: arguments of a further base class of a subclass.

    Raises:
        UserError: the configuration has unknown values or options that exclude each other.
    """

    output_projection: nn.Module | None
    layer_type: type[DecoderLayer] = DecoderLayer  # subclasses may have layers of another class

    def __init__(
        self,
        config: DecoderConfig,
        encodings: LayerEncodings,
        position_transforms: PositionTransforms,
        embed_tokens: nn.Module | None = None,
        layers: nn.ModuleList | None = None,
        quant_noise: nn.Module | None = None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        config.check()
        check_encodings(config, encodings)
        self.config, self.padding_idx, self.logit_softcap = config, config.padding_idx, config.logit_softcap
        input_width, width = config.input_width or config.width, config.width
        output_width = config.output_width or width
        self.embed_scale = math.sqrt(width) if config.scale_embedding else 1.0
        # checkpoints and optimizer states depend on the order of these modules
        self.dropout_module = Dropout(config.dropout)
        self.embed_tokens = make_embedding(config) if embed_tokens is None else embed_tokens
        self.quant_noise = quant_noise
        self.project_in_dim = make_projection(input_width, width) if input_width != width else None
        self.layernorm_embedding = make_norm(config, width) if config.embedding_norm else None
        self.layers = nn.ModuleList() if layers is None else layers
        self.layers.extend(self.layer_type(config, index) for index in range(config.layers))
        self.layer_norm = make_norm(config, width) if config.final_norm else None
        self.project_out_dim = make_projection(width, output_width) if self._projects_output() else None
        self._build_output()
        if config.init != "fairseq":
            initialize(self, config.init, config.layers)
        self.encodings = encodings
        self.position_transforms = position_transforms
        self.length_dependent = any(e.length_dependent for e in encodings)
        self.needs_token_ids = any(e.needs_token_ids for e in encodings)
        self.masks_end = any(map(needs_end_mask, encodings))
        self.compute = torch.bfloat16 if config.compute_dtype == "bf16" else None
        self.attend = choose_backend(config.backend, encodings)
        self.eps = 0.0

    def _projects_output(self) -> bool:
        """Return whether features are projected to another width before the output projection."""
        return (self.config.output_width or self.config.width) != self.config.width

    def _build_output(self) -> None:
        """Create the output projection."""
        config = self.config
        width = config.output_width or config.width
        if config.share_embeddings:
            table: Any = self.embed_tokens.weight
            self.output_projection = nn.Linear(table.shape[1], table.shape[0], bias=False)
            self.output_projection.weight = table
        else:
            self.output_projection = nn.Linear(width, config.vocabulary, bias=False)
            nn.init.normal_(self.output_projection.weight, std=width**-0.5)

    def prune_attention(self, eps: float) -> None:
        """Skip far keys that provably hold at most ``eps`` of each query's attention, from now on.

        Only evaluation prunes: on a CPU with the backend sdpa, on a GPU with the backend triton, or with auto, which
        chooses the right one. ``attention/prune.py`` derives the bound of the error.

        Args:
            eps: fraction of the attention that may be skipped, between 0 and 1.

        Raises:
            UserError: eps is not between 0 and 1, or the model cannot be pruned.
        """
        check_eps(eps)
        if not self.attend.supports_pruning:
            raise UserError("attention prunes on the backends sdpa and triton: choose --attention-backend sdpa")
        for encoding, spec in zip(self.encodings, self.encodings.specs, strict=True):
            options = encoding.attention_options
            for option, value in (("block", options.block), ("softcap", options.softcap)):
                if value:
                    raise UserError(f"'{spec}': the bound of pruning does not cover {option}: evaluate without pruning")
            if options.null_logit != "none":
                raise UserError(f"'{spec}': the bound of pruning does not cover null_logit: evaluate without pruning")
            # Any two tokens show the type of the bias. Encodings that need token ids cannot be asked without a text.
            if encoding.needs_token_ids or not isinstance(encoding.position_bias(Positions.arange(2)), ToeplitzBias):
                raise UserError("this encoding adds no bias of the distance alone: its attention cannot be pruned")
        self.eps = eps

    def set_num_updates(self, num_updates: int) -> None:
        """Pass the number of updates so far to the position transforms."""
        self.position_transforms.set_num_updates(num_updates)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which matrix products have the compute dtype (``--compute-dtype``).

        The decoder computes features in this context. In training the criterion also computes the logits in it;
        evaluation computes the logits in float32.

        Raises:
            UserError: the parameters are in half precision.
        """
        if self.compute is None:
            return nullcontext()
        if next(self.parameters()).dtype != torch.float32:
            raise UserError("--compute-dtype bf16 keeps parameters in float32: drop --fp16, --bf16 or the flag")
        return torch.autocast(device.type, self.compute)

    def layer_encoding(self, layer: int) -> Encoding:
        """Return the encoding of a layer.

        Args:
            layer: index among all layers, from 0; layers that LayerDrop leaves out are counted too.
        """
        return self.encodings.layer(layer)

    def forward(self, tokens: Tensor, cache: DecoderCache | None = None, documents: Tensor | None = None) -> Any:
        """Compute the logits (B, n, V) of the n tokens that are not in the cache; see :meth:`features`."""
        return self.output_layer(self.features(tokens, cache, documents))

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the logits (…, V) of features (…, C), with the softcap if there is one."""
        if self.output_projection is None:
            return features
        logits: Tensor = self.output_projection(features)
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap) if self.logit_softcap else logits

    def features(
        self,
        tokens: Tensor,
        cache: DecoderCache | None = None,
        documents: Tensor | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Compute the features before the output projection.

        Args:
            tokens: (B, m) token ids.
            cache: KV cache of the first m - n tokens, to which the others are appended; None: n = m.
            documents: (B, m) document numbers; neighbours with the same number form a document, which is read as if it
                were alone in its row. None: a row is one text.
            hidden_states: list to which the input and the output of each layer (B, n, C) are appended, or None. They
                are tensors of the graph, so that the loss has gradients with respect to them.

        Returns:
            (B, n, C) features of the n tokens that are not in the cache.

        Raises:
            UserError: documents are given with a cache, with a position transform, or with an encoding that cannot
                separate documents.
        """
        with self.autocast(tokens.device):
            return self._features(tokens, cache, documents, [] if hidden_states is None else hidden_states)

    def check_separate_documents(self) -> None:
        """Check that documents in one row can be read as if each were alone.

        Raises:
            UserError: a position transform is active, or an encoding depends on the length or the tokens of the row.
        """
        if self.position_transforms.active(self.training) is not None:
            raise UserError("position transforms move whole rows, not separate documents: use --blocks document")
        for encoding in self.encodings:
            check_separable(encoding)

    def _features(
        self, all_tokens: Tensor, cache: DecoderCache | None, documents: Tensor | None, hidden_states: list[Tensor]
    ) -> Tensor:
        """Compute the result of :meth:`features`: embedding, layers, layer norm and projection."""
        tokens = all_tokens[:, 0 if cache is None else len(cache) :]  # (B, n)
        padding = last_query = None  # what attention must mask besides future keys: padding, or other documents
        if documents is None:
            positions, padding = self._token_positions(all_tokens, tokens.shape[1], cache is not None)
        elif cache is not None:
            raise UserError("a text that is decoded with a cache is one document: leave documents out")
        else:
            positions, last_query = self._document_positions(all_tokens, documents)
        if self.needs_token_ids:  # the id of padding is -1, see Positions.tokens
            ids = all_tokens.masked_fill(all_tokens.eq(self.padding_idx), -1)
            positions = replace(positions, tokens=ids)
        x = self._embed(tokens, positions)  # (B, n, C)
        hidden_states.append(x)
        plans: dict[int, AttentionPlan] = {}  # by id of the encoding: layers that share an encoding share its plan
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            encoding = self.layer_encoding(layer.index)
            if id(encoding) not in plans:
                plans[id(encoding)] = self._build_plan(encoding, positions, padding, last_query, cache)
            x = self._run_layer(layer, x.transpose(0, 1), plans[id(encoding)], cache).transpose(0, 1)
            hidden_states.append(x)
        x = x.transpose(0, 1)  # (n, B, C)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)  # (B, n, C)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x if self.compute is None else x.float()

    def _position_dtype(self) -> torch.dtype:
        """Return the dtype of positions: float32, or float64 for a model with float64 parameters."""
        first = next(self.embed_tokens.parameters())  # one of several tables if the embedding is adaptive
        return torch.promote_types(first.dtype, torch.float32)

    def _token_positions(self, tokens: Tensor, n: int, has_cache: bool) -> tuple[Positions, Tensor | None]:
        """Return the positions of rows that are one text each, after the position transform.

        Args:
            tokens: (B, m) token ids.
            n: number of queries, which are the last tokens.
            has_cache: whether a KV cache is in use.

        Returns:
            The positions, and the padding (B, m) that attention must mask, or None.
        """
        is_padding = tokens.eq(self.padding_idx)
        positions, padding = positions_from_padding(is_padding, n, self.masks_end, self._position_dtype())
        transform = self.position_transforms.active(self.training)
        if transform is None:
            return positions, padding
        lengths = (~is_padding).sum(1).cpu()
        rows = []
        if transform.random and not self.training:  # random positions in evaluation are seeded by the tokens of a row
            rows = [ids[ids.ne(self.padding_idx)] for ids in tokens.cpu()]
        return self.position_transforms(positions, lengths, self.training, has_cache, rows), padding

    def _document_positions(self, tokens: Tensor, documents: Tensor) -> tuple[Positions, Tensor]:
        """Return the positions of rows of several documents.

        Args:
            tokens: (B, n) token ids.
            documents: (B, n) document numbers as in :meth:`features`.

        Returns:
            Positions that count the tokens of each document from 0, and ``last_query`` (B, n), the index of the last
            token that may see each token: the last one of its document.
        """
        self.check_separate_documents()
        # -1 is the number of no document, so padding is a document of its own that no real token sees
        document_numbers = documents.masked_fill(tokens.eq(self.padding_idx), -1)
        return positions_from_documents(document_numbers, self._position_dtype())

    def _embed(self, tokens: Tensor, positions: Positions) -> Tensor:
        """Return the input (B, n, C) of the first layer."""
        x = self.embed_scale * self.embed_tokens(tokens.contiguous())  # (B, n, C)
        for module in (self.quant_noise, self.project_in_dim):
            x = x if module is None else module(x)
        x = self.layer_encoding(0).embed(x, positions)  # acts once, at the input of the first layer
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        out: Tensor = self.dropout_module(x)
        return out

    def _build_plan(
        self,
        encoding: Encoding,
        positions: Positions,
        padding: Tensor | None,
        last_query: Tensor | None,
        cache: DecoderCache | None,
    ) -> AttentionPlan:
        """Return the attention plan of an encoding.

        A KV cache holds rotated keys if their rotation never changes: each token keeps its position, and the encoding
        rotates a key by its own position alone. Otherwise the cache holds keys before their rotation. If each token
        keeps its position, the cache may also drop keys that a window hides from later tokens.
        """
        positions_stay = (
            cache is not None
            and not cache.is_movable
            # a transform that depends on the length of the text moves cached tokens
            and self.position_transforms.length_invariant(self.training)
        )
        bias_cache = None if cache is None else cache.bias_cache
        return build_plan(
            encoding,
            positions,
            padding,
            self.attend,
            self.eps,
            keys_rotated=positions_stay and encoding.rotates and encoding.fixed_rotation,
            drops_keys=positions_stay,
            bias_cache=bias_cache,
            last_query=last_query,
        )

    def _run_layer(self, layer: DecoderLayer, x: Tensor, plan: AttentionPlan, cache: DecoderCache | None) -> Tensor:
        """Return the output (n, B, C) of a layer for its input x (n, B, C); activations may be checkpointed."""
        run: Any = layer
        if self.config.checkpoint_activations and self.training and torch.is_grad_enabled():
            # A reentrant checkpoint frees the graph of the bias after the backward pass of one layer, but several
            # layers share the bias.
            run = partial(checkpoint, layer, use_reentrant=False)
        out: Tensor = run(x, plan, None if cache is None else cache.layer(layer.index))
        return out


def make_embedding(config: DecoderConfig) -> nn.Embedding:
    """Return an embedding with normal weights of standard deviation 1/√C, and zeros for padding, as in fairseq."""
    width = config.input_width or config.width
    embedding = nn.Embedding(config.vocabulary, width, config.padding_idx)
    nn.init.normal_(embedding.weight, std=width**-0.5)
    with torch.no_grad():
        embedding.weight[config.padding_idx] = 0.0
    return embedding


def make_projection(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without a bias and with Xavier's initial weights."""
    projection = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(projection.weight)
    return projection


def check_encodings(config: DecoderConfig, encodings: LayerEncodings) -> None:
    """Check that the encodings fit the blocks of a decoder.

    Args:
        config: sizes and blocks.
        encodings: encodings of the layers.

    Raises:
        UserError: an encoding is defined by a bias of queries or keys that QK-norm would change.
    """
    for encoding in encodings:
        reads_projections = encoding.has_content_bias and not encoding.has_token_features
        if config.qk_norm != "none" and reads_projections and not encoding.reads_normalised:
            raise UserError(
                f"--qk-norm {config.qk_norm}: {type(encoding).__name__} is defined by a bias of queries and keys "
                "that are not normalised: use --qk-norm none, or another encoding"
            )
