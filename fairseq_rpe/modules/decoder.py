"""A fairseq language-model decoder whose positions come from an encoding."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_rpe.attention import Plan, check_eps, choose
from fairseq_rpe.attention.forward import Tables, check_separable, counted, plan_of, separated
from fairseq_rpe.core.bias import Positions, ToeplitzBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.modules.attention import MovableCache, RPEDecoderLayer
from fairseq_rpe.positions.position_transforms import Moves

Cache = dict[str, Any] | None  # keys and values of earlier tokens
# what --compute-dtype names: the dtype of matrix products, parameters and residual stream stay in float32
COMPUTE = {"fp32": None, "bf16": torch.bfloat16}


class RPEDecoder(TransformerDecoderBase):
    """fairseq's decoder with its own layer loop.

    ``encodings`` are one for all layers, or one per layer; ``backend`` names that of attention; ``compute`` is a key of
    :data:`COMPUTE`.
    """

    def __init__(
        self, cfg, dictionary, embed_tokens, encodings: list[Encoding], moves: Moves, backend: str, compute: str
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn=True)
        for index, layer in enumerate(self.layers.children()):
            layer.index = index
        self.checkpointed = bool(cfg.checkpoint_activations)
        self.encodings = nn.ModuleList(encodings)
        self.moves = moves
        self.length_dependent = any(e.length_dependent for e in encodings)
        self.needs_token_ids = any(e.needs_token_ids for e in encodings)
        self.compute = COMPUTE[compute]
        self.attend = choose(backend, encodings)
        self.eps = 0.0

    def prune_attention(self, eps: float) -> None:
        """From here on leave out up to ``eps`` of each query's attention, far keys that provably weigh no more.

        For evaluation, on a CPU or with the backend triton; ``attention/prune.py`` has the bound of the error. Raises
        UserError: eps is not between 0 and 1, or this model cannot be pruned.
        """
        check_eps(eps)
        if not self.attend.prunes:
            raise UserError("attention prunes on the backends sdpa and triton: choose --attention-backend sdpa")
        for encoding in self.encodings:
            if encoding.needs_token_ids or not isinstance(encoding.position_bias(Positions.arange(2)), ToeplitzBias):
                raise UserError("this encoding adds no bias of the distance alone: its attention cannot be pruned")
        self.eps = eps

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return RPEDecoderLayer(cfg, no_encoder_attn)

    def set_num_updates(self, num_updates: int) -> None:
        self.moves.set_num_updates(num_updates)

    def computing(self, device: torch.device) -> AbstractContextManager[Any]:
        """Matrix products in the chosen dtype; evaluation computes its logits outside, in float32.

        Raises UserError: the parameters are in half precision already.
        """
        if self.compute is None:
            return nullcontext()
        if next(self.parameters()).dtype != torch.float32:
            raise UserError("--compute-dtype bf16 keeps parameters in float32: drop --fp16, --bf16 or the flag")
        return torch.autocast(device.type, self.compute)

    def max_positions(self) -> int:
        return 2**31 - 1  # fairseq drops longer blocks in silence, so the model names no smaller limit

    def encoding_of(self, layer: int) -> Encoding:
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
        """Tokens to logits, or with ``features_only`` to features.

        Args:
            prev_output_tokens: (B, m) ids of the tokens.
            encoder_out: None, there is no encoder.
            incremental_state: keys and values of earlier tokens, or None.
            features_only: leave out the output projection.
            full_context_alignment: False, as the next three are None or without effect here, as in fairseq's decoder.
            alignment_layer: None.
            alignment_heads: None.
            src_lengths: not read.
            return_all_hiddens: not read.
            documents: (B, m) integers, neighbours with one number are of one document, and each document is read as if
                it were alone in its row; None: a row is one text.

        Returns:
            (B, n, types) or (B, n, C), n = m or those not yet cached; and the states of the layers.

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
        """Tokens (B, m) -> features (B, n, C): n = m, or those not yet cached in ``incremental_state``.

        ``documents``: as in :meth:`forward`. Raises UserError: what an encoder has, or documents with a cache, with
        positions that a transform moves, or with an encoding that does not treat them as it would each alone.
        """
        if any(asked is not None and asked is not False for asked in (encoder_out, *alignment.values())):
            raise UserError("transformer_rpe_lm is a causal language model: no encoder, full context or alignment")
        with self.computing(prev_output_tokens.device):
            return self._features(prev_output_tokens, incremental_state, documents)

    def check_separable(self) -> None:
        """Refuse to read documents that share rows as if each were alone.

        Raises:
            UserError: a position transform is in force, or an encoding reads more of a row than positions.
        """
        if self.moves.active(self.training) is not None:
            raise UserError("position transforms move whole rows, not separate documents: use --blocks document")
        for encoding in self.encodings:
            check_separable(encoding)

    def _features(
        self, prev_output_tokens: Tensor, incremental_state: Cache, documents: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        tokens = prev_output_tokens[:, self._cached(incremental_state) :]
        # positions of a model in float64 are float64, too; adaptive inputs have several tables
        wide = torch.promote_types(next(self.embed_tokens.parameters()).dtype, torch.float32)
        unread, last_query = prev_output_tokens.eq(self.padding_idx), None
        if documents is None:
            positions, padding = counted(unread, tokens.shape[1], self.length_dependent, wide)
        else:
            if incremental_state is not None:
                raise UserError("a text that is decoded with a cache is one document: leave documents out")
            self.check_separable()
            positions, last_query = separated(documents.masked_fill(unread, -1), wide)
            padding = None
        moves = self.moves.active(self.training)
        if moves is not None:
            lengths = prev_output_tokens.ne(self.padding_idx).sum(1).cpu()
            drawn = moves.random and not self.training
            rows = [ids[ids.ne(self.padding_idx)] for ids in prev_output_tokens.cpu()] if drawn else []
            positions = self.moves(positions, lengths, self.training, incremental_state is not None, rows)

        if self.needs_token_ids:
            ids = prev_output_tokens.masked_fill(prev_output_tokens.eq(self.padding_idx), -1)
            positions = replace(positions, tokens=ids)

        x = self.embed_scale * self.embed_tokens(tokens.contiguous())
        for change in (self.quant_noise, self.project_in_dim):
            x = x if change is None else change(x)
        x = self.encodings[0].embed(x, positions)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x).transpose(0, 1)

        states = [x]
        plans: dict[int, Plan] = {}
        tables = self._tables(incremental_state)
        stay = not isinstance(incremental_state, MovableCache) and self.moves.length_invariant(self.training)
        for layer in self.layers:
            encoding = self.encoding_of(layer.index)
            if id(encoding) not in plans:
                turned = tables is not None and stay and encoding.rotates and encoding.fixed_rotation
                plans[id(encoding)] = plan_of(
                    encoding,
                    positions,
                    padding,
                    self.attend,
                    self.eps,
                    turned=turned,
                    tables=tables,
                    last_query=last_query,
                )
            x = self._run(layer, x, incremental_state, plans[id(encoding)])
            states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        if self.compute is not None:
            x = x.float()
        return x, {"attn": [None], "inner_states": states}

    def _cached(self, incremental_state: Cache) -> int:
        """Tokens whose keys and values are in the cache: the next call may bring one more, or a whole prompt."""
        cache = self.layers[0].self_attn._get_input_buffer(incremental_state) if incremental_state else {}
        return cache["prev_key"].shape[2] if "prev_key" in cache else 0

    def _tables(self, incremental_state: Cache) -> Tables | None:
        """Those of the text that is in the cache; None: there is no cache."""
        if incremental_state is None:
            return None
        tables = self.get_incremental_state(incremental_state, "tables")
        if tables is None:
            tables = dict[int, Any]()
            self.set_incremental_state(incremental_state, "tables", tables)
        return tables

    def _run(self, layer: nn.Module, x: Tensor, incremental_state: Cache, plan: Plan) -> Tensor:
        if self.checkpointed and self.training and torch.is_grad_enabled():
            # not fairseq's reentrant wrapper: the layers share the graph of the bias, which that would free too early
            layer = partial(checkpoint, layer, use_reentrant=False)
        return layer(x, None, None, incremental_state, self_attn_mask=plan)[0]
