"""fairseq's language-model decoder with any positional encoding."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention import AttentionPlan, check_eps, choose_backend
from fairseq_rpe.attention.forward import (
    BiasCache,
    build_plan,
    check_separable,
    positions_from_documents,
    positions_from_padding,
)
from fairseq_rpe.core.bias import ToeplitzBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.modules.attention import MovableCache, RPEDecoderLayer
from fairseq_rpe.positions.position_transforms import PositionTransforms

Cache = dict[str, Any] | None  # KV cache
# values of --compute-dtype: dtype of matrix products; parameters and residual stream stay in float32
COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


class RPEDecoder(TransformerDecoderBase):
    """fairseq's decoder with its own layer loop.

    Args:
        cfg: fairseq's TransformerConfig.
        dictionary: dictionary of the tokens.
        embed_tokens: embedding of the tokens, fairseq's ``Embedding`` or ``AdaptiveInput``.
        encodings: one encoding for all layers, or one per layer.
        position_transforms: transforms of positions in training and evaluation.
        backend: name of the attention backend.
        compute: key of :data:`COMPUTE_DTYPES`.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        encodings: list[Encoding],
        position_transforms: PositionTransforms,
        backend: str,
        compute: str,
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn=True)
        # children() yields every layer; iterating over self.layers leaves layers out at random with --decoder-layerdrop
        for index, layer in enumerate(self.layers.children()):
            layer.index = index
        self.checkpointed = bool(cfg.checkpoint_activations)
        self.encodings = nn.ModuleList(encodings)
        self.position_transforms = position_transforms
        self.length_dependent = any(e.length_dependent for e in encodings)
        self.needs_token_ids = any(e.needs_token_ids for e in encodings)
        self.compute = COMPUTE_DTYPES[compute]
        self.attend = choose_backend(backend, encodings)
        self.eps = 0.0

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
        for encoding in self.encodings:
            # Any two tokens show the type of the bias. Encodings that need token ids cannot be asked without a text.
            if encoding.needs_token_ids or not isinstance(encoding.position_bias(Positions.arange(2)), ToeplitzBias):
                raise UserError("this encoding adds no bias of the distance alone: its attention cannot be pruned")
        self.eps = eps

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        """Return a layer; fairseq calls this."""
        return RPEDecoderLayer(cfg, no_encoder_attn)

    def set_num_updates(self, num_updates: int) -> None:
        """Pass the number of updates so far to the position transforms; fairseq calls this."""
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

    def max_positions(self) -> int:
        """Return a limit that no text exceeds; fairseq silently drops texts that are longer."""
        return 2**31 - 1

    def layer_encoding(self, layer: int) -> Encoding:
        """Return the encoding of a layer.

        Args:
            layer: index among all layers, from 0; layers that LayerDrop leaves out are counted too.
        """
        return self.encodings[layer if len(self.encodings) > 1 else 0]

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Cache = None,
        features_only: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        src_lengths: Any = None,
        return_all_hiddens: bool = False,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute logits, or features with ``features_only``.

        Args:
            prev_output_tokens: (B, m) token ids.
            encoder_out: must be None.
            incremental_state: KV cache of earlier tokens, or None.
            features_only: skip the output projection.
            full_context_alignment: must be False.
            alignment_layer: must be None.
            alignment_heads: must be None.
            src_lengths: not read.
            return_all_hiddens: not read.
            documents: (B, m) document numbers; neighbours with the same number form a document, which is read as if it
                were alone in its row. None: a row is one text.

        Returns:
            (B, n, V) logits or (B, n, C) features of the n tokens that are not in the cache, and the layers' states.

        Raises:
            UserError: what :meth:`extract_features` refuses.
        """
        alignment: dict[str, Any] = {"alignment_layer": alignment_layer, "alignment_heads": alignment_heads}
        x, extra = self.extract_features(
            prev_output_tokens,
            encoder_out,
            incremental_state,
            documents,
            full_context_alignment=full_context_alignment,
            **alignment,
        )
        return x if features_only else self.output_layer(x), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Cache = None,
        documents: Tensor | None = None,
        **alignment: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the features before the output projection.

        Args:
            prev_output_tokens: (B, m) token ids.
            encoder_out: must be None.
            incremental_state: KV cache of earlier tokens, or None.
            documents: (B, m) document numbers as in :meth:`forward`.
            alignment: must be None or False.

        Returns:
            (B, n, C) features of the n tokens that are not in the cache, and the layers' states.

        Raises:
            UserError: an encoder, full context or alignment is given; or documents are given with a cache, with a
                position transform, or with an encoding that cannot separate documents.
        """
        if any(option is not None and option is not False for option in (encoder_out, *alignment.values())):
            raise UserError("transformer_rpe_lm is a causal language model: no encoder, full context or alignment")
        with self.autocast(prev_output_tokens.device):
            return self._features(prev_output_tokens, incremental_state, documents)

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
        self, prev_output_tokens: Tensor, incremental_state: Cache, documents: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the result of :meth:`extract_features`: embedding, layers, layer norm and projection."""
        tokens = prev_output_tokens[:, self._cached_tokens(incremental_state) :]  # (B, n)
        has_cache = incremental_state is not None
        padding = last_query = None  # what attention must mask besides future keys: padding, or other documents
        if documents is None:
            positions, padding = self._token_positions(prev_output_tokens, tokens.shape[1], has_cache)
        elif has_cache:
            raise UserError("a text that is decoded with a cache is one document: leave documents out")
        else:
            positions, last_query = self._document_positions(prev_output_tokens, documents)
        if self.needs_token_ids:  # the id of padding is -1, see Positions.tokens
            ids = prev_output_tokens.masked_fill(prev_output_tokens.eq(self.padding_idx), -1)
            positions = replace(positions, tokens=ids)
        x = self._embed(tokens, positions).transpose(0, 1)  # (n, B, C)
        states = [x]
        plans: dict[int, AttentionPlan] = {}  # by id of the encoding: layers that share an encoding share its plan
        for layer in self.layers:
            encoding = self.layer_encoding(layer.index)
            if id(encoding) not in plans:
                plans[id(encoding)] = self._build_plan(encoding, positions, padding, last_query, incremental_state)
            x = self._run_layer(layer, x, incremental_state, plans[id(encoding)])
            states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)  # (B, n, C)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        if self.compute is not None:
            x = x.float()
        return x, {"attn": [None], "inner_states": states}

    def _position_dtype(self) -> torch.dtype:
        """Return the dtype of positions: float32, or float64 for a model with float64 parameters."""
        first = next(self.embed_tokens.parameters())  # one of several tables if it is an AdaptiveInput
        return torch.promote_types(first.dtype, torch.float32)

    def _token_positions(self, prev_output_tokens: Tensor, n: int, has_cache: bool) -> tuple[Positions, Tensor | None]:
        """Return the positions of rows that are one text each, after the position transform.

        Args:
            prev_output_tokens: (B, m) token ids.
            n: number of queries, which are the last tokens.
            has_cache: whether a KV cache is in use.

        Returns:
            The positions, and the padding (B, m) that attention must mask, or None.
        """
        is_padding = prev_output_tokens.eq(self.padding_idx)
        positions, padding = positions_from_padding(is_padding, n, self.length_dependent, self._position_dtype())
        transform = self.position_transforms.active(self.training)
        if transform is None:
            return positions, padding
        lengths = (~is_padding).sum(1).cpu()
        rows = []
        if transform.random and not self.training:  # random positions in evaluation are seeded by the tokens of a row
            rows = [ids[ids.ne(self.padding_idx)] for ids in prev_output_tokens.cpu()]
        return self.position_transforms(positions, lengths, self.training, has_cache, rows), padding

    def _document_positions(self, tokens: Tensor, documents: Tensor) -> tuple[Positions, Tensor]:
        """Return the positions of rows of several documents.

        Args:
            tokens: (B, n) token ids.
            documents: (B, n) document numbers as in :meth:`forward`.

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
        x = self.encodings[0].embed(x, positions)  # acts once, at the input of the first layer
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x)

    def _build_plan(
        self,
        encoding: Encoding,
        positions: Positions,
        padding: Tensor | None,
        last_query: Tensor | None,
        incremental_state: Cache,
    ) -> AttentionPlan:
        """Return the attention plan of an encoding.

        A KV cache holds rotated keys if their rotation never changes: each token keeps its position, and the encoding
        rotates a key by its own position alone. Otherwise the cache holds keys before their rotation.
        """
        # The position transform moves cached tokens if it depends on the length of the text; the user of a MovableCache
        # drops its oldest tokens, so that the positions of all others change.
        is_movable = isinstance(incremental_state, MovableCache)
        keeps_positions = self.position_transforms.length_invariant(self.training) and not is_movable
        has_cache = incremental_state is not None
        return build_plan(
            encoding,
            positions,
            padding,
            self.attend,
            self.eps,
            keys_rotated=has_cache and keeps_positions and encoding.rotates and encoding.fixed_rotation,
            bias_cache=self._bias_cache(incremental_state),
            last_query=last_query,
        )

    def _cached_tokens(self, incremental_state: Cache) -> int:
        """Return the number of tokens in the KV cache."""
        cache = self.layers[0].self_attn._get_input_buffer(incremental_state) if incremental_state else {}
        return cache["prev_key"].shape[2] if "prev_key" in cache else 0

    def _bias_cache(self, incremental_state: Cache) -> BiasCache | None:
        """Return the bias cache of the text in the KV cache; None without a KV cache."""
        if incremental_state is None:
            return None
        bias_cache = self.get_incremental_state(incremental_state, "bias_cache")
        if bias_cache is None:
            bias_cache = dict[int, Any]()
            self.set_incremental_state(incremental_state, "bias_cache", bias_cache)
        return bias_cache

    def _run_layer(self, layer: nn.Module, x: Tensor, incremental_state: Cache, plan: AttentionPlan) -> Tensor:
        """Return the output (n, B, C) of a layer for its input x (n, B, C); activations may be checkpointed."""
        if self.checkpointed and self.training and torch.is_grad_enabled():
            # fairseq's checkpoints are reentrant. That variant frees the graph of the bias after the backward pass of
            # one layer, but several layers share the bias.
            layer = partial(checkpoint, layer, use_reentrant=False)
        # fairseq's layer passes self_attn_mask on to RPEAttention without reading it
        return layer(x, None, None, incremental_state, self_attn_mask=plan)[0]
