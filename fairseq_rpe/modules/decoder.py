"""fairseq's language-model decoder: the decoder in plain torch with the features that need fairseq's own classes."""

from typing import Any

from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from fairseq.modules import AdaptiveSoftmax, FairseqDropout, LayerDropModuleList
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.decoder.dropout import Dropout
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.positions.position_transforms import PositionTransforms

IncrementalState = dict[str, Any]  # what fairseq passes from step to step while a text is decoded
_CACHE = "fairseq_rpe_cache"  # key of the KV cache in it
_ACTIVATIONS = {"gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}  # fairseq's names of an activation
# names by which --retain-dropout-modules knows the modules that have dropout
_DROPOUT_OWNERS = {"SelfAttention": "RPEAttention", "DecoderLayer": "RPEDecoderLayer"}


class RPEDecoder(Decoder, FairseqIncrementalDecoder):
    """The decoder for fairseq's trainer and generator.

    Args:
        cfg: fairseq's TransformerConfig.
        config: sizes and blocks, as :func:`decoder_config` returns them.
        dictionary: dictionary of the tokens.
        embed_tokens: embedding of the tokens, fairseq's ``Embedding`` or ``AdaptiveInput``.
        encodings: encodings of the layers.
        position_transforms: transforms of positions in training and evaluation.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        config: DecoderConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        encodings: LayerEncodings,
        position_transforms: PositionTransforms,
    ) -> None:
        self._cfg = cfg  # nn.Module allows plain attributes before its constructor runs
        layers = LayerDropModuleList(cfg.decoder.layerdrop) if cfg.decoder.layerdrop > 0 else None
        noise, block_size = cfg.quant_noise.pq, cfg.quant_noise.pq_block_size
        noisy = None
        if noise > 0 and not cfg.adaptive_input:
            noisy = quant_noise(nn.Linear(config.width, config.width, bias=False), noise, block_size)
        super().__init__(config, encodings, position_transforms, embed_tokens, layers, noisy, dictionary=dictionary)
        # fairseq reads these when it loads a checkpoint
        self.register_buffer("version", Tensor([3]))
        self.num_layers, self.share_input_output_embed = config.layers, config.share_embeddings
        self._use_fairseq_activation()
        self._use_fairseq_dropout()
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                quant_noise(module, noise, block_size)

    # old checkpoints of fairseq name some parameters differently
    upgrade_state_dict_named = TransformerDecoderBase.upgrade_state_dict_named

    def _projects_output(self) -> bool:
        """Return whether features are projected; with tied adaptive weights the softmax does so."""
        return super()._projects_output() and not self._cfg.tie_adaptive_weights

    def _build_output(self) -> None:
        """Create the output projection, or fairseq's adaptive softmax."""
        cfg = self._cfg
        if cfg.adaptive_softmax_cutoff is None:
            super()._build_output()
            return
        self.output_projection = None
        self.adaptive_softmax = AdaptiveSoftmax(
            self.config.vocabulary,
            self.config.output_width or self.config.width,
            utils.eval_str_list(cfg.adaptive_softmax_cutoff, type=int),
            dropout=cfg.adaptive_softmax_dropout,
            adaptive_inputs=self.embed_tokens if cfg.tie_adaptive_weights else None,
            factor=cfg.adaptive_softmax_factor,
            tie_proj=cfg.tie_adaptive_proj,
        )

    def _use_fairseq_activation(self) -> None:
        """Give layers fairseq's activation function, which rounds differently from torch's, unless it is gated."""
        if not self.config.is_gated:
            for layer in self.layers.children():
                layer.activation = utils.get_activation_fn(str(self._cfg.activation_fn))

    def _use_fairseq_dropout(self) -> None:
        """Replace each dropout by fairseq's, which ``--retain-dropout`` keeps active in generation."""
        for owner in list(self.modules()):
            owner_name = type(owner).__name__
            for name, module in owner.named_children():
                if isinstance(module, Dropout):
                    setattr(owner, name, _RetainedDropout(module.p, _DROPOUT_OWNERS.get(owner_name, owner_name)))

    def max_positions(self) -> int:
        """Return a limit that no text exceeds; fairseq silently drops texts that are longer."""
        return 2**31 - 1

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: IncrementalState | DecoderCache | None = None,
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
            incremental_state: fairseq's state with the KV cache of earlier tokens, or the cache itself, or None.
            features_only: skip the output projection.
            full_context_alignment: must be False.
            alignment_layer: must be None.
            alignment_heads: must be None.
            src_lengths: not read.
            return_all_hiddens: not read.
            documents: (B, m) document numbers as in :meth:`Decoder.features`.

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
        incremental_state: IncrementalState | DecoderCache | None = None,
        documents: Tensor | None = None,
        **alignment: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the features before the output projection.

        Args:
            prev_output_tokens: (B, m) token ids.
            encoder_out: must be None.
            incremental_state: fairseq's state with the KV cache of earlier tokens, or the cache itself, or None.
            documents: (B, m) document numbers as in :meth:`Decoder.features`.
            alignment: must be None or False.

        Returns:
            (B, n, C) features of the n tokens that are not in the cache, and the layers' states.

        Raises:
            UserError: an encoder, full context or alignment is given; or what :meth:`Decoder.features` refuses.
        """
        if any(option is not None and option is not False for option in (encoder_out, *alignment.values())):
            raise UserError("transformer_rpe_lm is a causal language model: no encoder, full context or alignment")
        states: list[Tensor] = []
        x = self.features(prev_output_tokens, _next_cache(incremental_state), documents, states)
        return x, {"attn": [None], "inner_states": [state.transpose(0, 1) for state in states]}  # (n, B, C)

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Select rows of the KV cache for beam search.

        Args:
            incremental_state: fairseq's state, or the cache itself.
            new_order: (R',) int64 rows to keep; a row may be left out or repeated.
        """
        cache = _next_cache(incremental_state)
        if cache is not None:
            cache.select_rows(new_order)


def _next_cache(state: IncrementalState | DecoderCache | None) -> DecoderCache | None:
    """Return the cache that the next step may change: a copy of that in fairseq's state, in which it is replaced.

    A shallow copy of the state, which holds the earlier cache, may then be continued in another way.
    """
    if state is None or isinstance(state, DecoderCache):
        return state
    cache = state[_CACHE].copy() if _CACHE in state else DecoderCache()
    state[_CACHE] = cache
    return cache


class _RetainedDropout(FairseqDropout):
    """fairseq's dropout with the probability that attention reads."""

    @property
    def active_p(self) -> float:
        """The probability that is in effect now."""
        return self.p if self.training or self.apply_during_inference else 0.0


def decoder_config(cfg: TransformerConfig, vocabulary: int, padding_idx: int, **blocks: Any) -> DecoderConfig:
    """Return the configuration of the decoder that fairseq's configuration describes.

    Args:
        cfg: fairseq's TransformerConfig.
        vocabulary: number of symbols of the dictionary.
        padding_idx: id of padding.
        blocks: settings that fairseq does not have.
    """
    decoder = cfg.decoder
    pre_norm = decoder.normalize_before
    settings = {
        "layers": decoder.layers,
        "width": decoder.embed_dim,
        "heads": decoder.attention_heads,
        "ffn_width": decoder.ffn_embed_dim,
        "input_width": decoder.input_dim,
        "output_width": decoder.output_dim,
        "norm_position": "pre" if pre_norm else "post",
        "final_norm": pre_norm and not cfg.no_decoder_final_norm,
        "embedding_norm": cfg.layernorm_embedding,
        "activation": _ACTIVATIONS.get(str(cfg.activation_fn), str(cfg.activation_fn)),
        "scale_embedding": not cfg.no_scale_embedding,
        "share_embeddings": cfg.share_decoder_input_output_embed,
        "dropout": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
        "activation_dropout": cfg.activation_dropout or cfg.relu_dropout or 0.0,
        "checkpoint_activations": bool(cfg.checkpoint_activations),
    }
    return DecoderConfig(vocabulary=vocabulary, padding_idx=padding_idx, **{**settings, **blocks})
