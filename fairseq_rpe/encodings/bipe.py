"""BiPE: a position within a segment of the text, and a position of the segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import check_embedding_input
from fairseq_rpe.encodings.absolute import Sinusoidal
from fairseq_rpe.encodings.alibi import Alibi, slopes
from fairseq_rpe.encodings.base import Encoding, register
from fairseq_rpe.encodings.rope import Rope


@dataclass(frozen=True)
class SegmentPositions(Positions):
    """Positions that count segments instead of tokens."""


class _SegmentAlibi(Alibi):
    """ALiBi over segments; a step to the next segment counts as ``factor`` tokens."""

    factor: float = 1.0

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        return (self.factor * slopes(self.heads, like.dtype, like.device),)


def count_segments(tokens: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Count segments, and tokens within each segment.

    Args:
        tokens: (B, m) int64 ids, negative at padding, which is not counted.
        ends: (E,) int64 ids of tokens that are the last of their segment.

    Returns:
        Index of each token's segment, and of the token within its segment, both from 0, (B, m) int64.
    """
    real = tokens >= 0
    closes = torch.isin(tokens, ends) & real
    segment = closes.long().cumsum(1) - closes.long()  # segments that ended before this token
    count = real.long().cumsum(1)
    before = F.pad(torch.where(closes, count, 0), (1, 0))[:, :-1].cummax(1).values  # tokens of earlier segments
    return segment, (count - 1 - before).clamp_min(0)


def segment_delimiter_ids(names: Sequence[str], symbols: Sequence[str]) -> list[int]:
    """Return the ids of the symbols that end a segment.

    Args:
        names: symbols; one without letters or digits also stands for all symbols that end in it.
        symbols: symbols of the dictionary by id.

    Raises:
        UserError: a name matches no symbol.
    """
    ids: set[int] = set()
    for name in names:
        is_sign = not any(letter.isalnum() for letter in name)
        matches = {i for i, symbol in enumerate(symbols) if symbol == name or (is_sign and symbol.endswith(name))}
        if not matches:
            relation = "is or ends in" if is_sign else "is"
            raise UserError(
                f"'bipe:segment_delimiters={'+'.join(names)}': no symbol of the dictionary {relation} '{name}': name "
                "symbols that end a segment, as segment_delimiters=</s>+."
            )
        ids |= matches
    return sorted(ids)


@register("bipe", colour="sky blue", marker="P")
class Bipe(Encoding):
    """BiPE (He et al. 2024, arXiv 2401.16421): intra-segment vectors at the input, inter-segment RoPE or ALiBi.

    Segments end with a full stop or a line, or with the symbols of ``segment_delimiters``; the token that ends a
    segment belongs to it. The index t of a token within its segment starts at 0 and is clipped at the table's end: the
    input is x + table[t], table (max_intra, C). Let n_i be the index of token i's segment, from 0: ``inter=rope``
    rotates by n_i in place of i, ``inter=alibi`` adds -factor·k_h·(n_i - n_j). Both indices depend on earlier tokens
    only, so decoding continues them; padding is not counted. Within a row, counting starts at its first token, which in
    fairseq's rows is often the </s> of the previous line and then forms a segment.

    The authors' code adds +96·k_h·n_j, of the key's segment, which is equal after softmax, and takes two token ids of
    LLaMA's vocabulary as delimiters.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``bipe``."""

        inter: str = option("rope", "inter-segment encoding in attention", choices=("rope", "alibi"))
        intra: str = option("learned", "intra-segment vectors at the input", choices=("learned", "sinusoidal"))
        segment_delimiters: str = option(
            "</s>+.",
            "symbols that end a segment, joined by +; a sign also matches symbols that end in it; </s> ends a line",
        )
        max_intra: int = option(1024, "learned: rows of the table; later tokens of a segment share the last", minimum=1)
        factor: float = option(96.0, "alibi: tokens that a step to the next segment counts as", above=0)
        base: float = option(10000.0, "rope: b in θ_s = b^(-2s/d)", above=1)

    formula = "x + table[index in segment];  rope by n_i, or -96·k_h·(n_i - n_j),  n: index of the segment"
    paper = "He et al. 2024 (arXiv 2401.16421)"
    family = "segments"
    sharing_modes = ("model",)
    position_type = "none"
    needs_token_ids = True
    fixed_rotation = True
    ends: Tensor

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the quantity of the rotation that each option sets, by the name of the option."""
        return {"base": "base"} if config.inter == "rope" else {}

    def setup(self) -> None:
        """Check the options and create the parameters."""
        cfg = self.config
        self._refuse_unused_options()
        if cfg.inter == "rope":
            self.inter: Encoding = Rope(Rope.Config(base=cfg.base), self.heads, self.width)
        else:
            self.inter = _SegmentAlibi(_SegmentAlibi.Config(), self.heads, self.width)
            self.inter.factor = cfg.factor
            self.dependence = (
                "the bias falls by a constant k for each segment: Σ exp(bias) is at most m/(1 - e^-k) if no segment "
                "has more than m tokens, and grows with the length of the longest segment"
            )
        self.table: nn.Parameter | None = None
        if cfg.intra == "learned":
            self.table = nn.Parameter(torch.randn(cfg.max_intra, self.width) * 0.02)
        else:
            self.waves = Sinusoidal(Sinusoidal.Config(), self.heads, self.width)
        names = [name for name in cfg.segment_delimiters.split("+") if name]
        ids = [] if self.symbols is None else segment_delimiter_ids(names, self.symbols)
        self.register_buffer("ends", torch.tensor(ids, dtype=torch.int64))

    def _refuse_unused_options(self) -> None:
        """Refuse an option that was set but has no effect in combination with the others."""
        cfg = self.config
        unused = ["factor" if cfg.inter == "rope" else "base"]
        if cfg.intra == "sinusoidal":
            unused.append("max_intra")
        for f in fields(self.Config):
            if f.name in unused and getattr(cfg, f.name) != f.default:
                raise UserError(f"'bipe:inter={cfg.inter},intra={cfg.intra}' does not read {f.name}: leave it out")

    def segments_and_offsets(self, pos: Positions) -> tuple[Tensor, Tensor]:
        """Return the segment of each token and its index within the segment, as :func:`count_segments` does."""
        if pos.tokens is None:
            raise UserError(
                "'bipe' reads the tokens, which are not available here: train and evaluate it as a model, or pass "
                "positions=Positions(..., tokens=ids)"
            )
        if not len(self.ends):
            raise UserError("'bipe' does not know which tokens end a segment: pass symbols=… to build(...)")
        return count_segments(pos.tokens, self.ends)

    def prepare_positions(self, pos: Positions) -> Positions:
        """Return the segments of tokens as positions."""
        segments, _ = self.segments_and_offsets(pos)
        segments = segments.to(pos.k.dtype)  # (B, m)
        return SegmentPositions(segments[:, -pos.q.shape[1] :], segments, 1.0, contiguous=False)

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        """Add the vectors of indices within segments to x (B, n, C); same shape."""
        check_embedding_input(x, pos, self.width)
        _, offsets = self.segments_and_offsets(pos)
        offset = offsets[:, -x.shape[1] :]  # (B, n), of the last n tokens
        if self.table is None:
            return x + self.waves.vectors(offset.to(pos.k.dtype)).to(x.dtype)
        return x + F.embedding(offset.clamp_max(len(self.table) - 1), self.table).to(x.dtype)

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate x (B, H, n, D) by the segments of its tokens; same shape."""
        return self.inter.rotate(x, at, _require_segments(pos), key)

    def position_bias(self, pos: Positions) -> Bias | None:
        """Return ALiBi's bias of segments, or None with ``inter=rope``."""
        return None if self.rotates else self.inter.position_bias(_require_segments(pos))

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.config.inter == "rope"

    @property
    def adds_bias(self) -> bool:
        """Whether positions alone decide a bias: no, segments depend on the tokens."""
        return False

    def log_bias_formulas(self) -> Any:
        """Return the formulas of RoPE, or None with ``inter=alibi``."""
        return self.inter.log_bias_formulas() if self.rotates else None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        loaded = state_dict.get(prefix + "ends")
        if isinstance(loaded, Tensor) and loaded.dim() == 1 and loaded.dtype == torch.int64:
            # the number of delimiters may differ from that of this encoding, and loading needs equal shapes
            self.ends = torch.zeros_like(loaded, device=self.ends.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _require_segments(pos: Positions) -> Positions:
    """Return ``pos``; refuse positions that did not pass through ``prepare_positions``."""
    if not isinstance(pos, SegmentPositions):
        raise UserError(
            "'bipe' depends in attention on where the text's segments end, not on positions alone: call "
            "fairseq_rpe.attend with the tokens, or a model"
        )
    return pos
