"""BiPE: one position within a segment of the text, another of the segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import check_embedded
from fairseq_rpe.encodings.absolute import Sinusoidal
from fairseq_rpe.encodings.alibi import Alibi, slopes
from fairseq_rpe.encodings.base import Encoding, register
from fairseq_rpe.encodings.rope import Rope


@dataclass(frozen=True)
class Segments(Positions):
    """Positions that are the numbers of segments."""


class _Stepped(Alibi):
    """ALiBi whose every step weighs ``factor`` tokens."""

    factor: float = 1.0

    def head_parameters(self, like: Tensor) -> tuple[Tensor, ...]:
        return (self.factor * slopes(self.heads, like.dtype, like.device),)


def count(tokens: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each token's segment, and its own within that, both from 0: int64 (B, m).

    tokens: (B, m) ids, negative at padding, which is not counted; ends: (E,) ids that end their segment, so that the
    next token begins another one.
    """
    real = tokens >= 0
    closes = torch.isin(tokens, ends) & real
    segment = closes.long().cumsum(1) - closes.long()
    seen = real.long().cumsum(1)
    before = F.pad(torch.where(closes, seen, 0), (1, 0))[:, :-1].cummax(1).values  # tokens of earlier segments
    return segment, (seen - 1 - before).clamp_min(0)


def ids_of(names: Sequence[str], symbols: Sequence[str]) -> list[int]:
    """Ids of the symbols that a name means: a sign without letters or digits also where a symbol ends in it.

    Raises UserError: a name means none.
    """
    found: set[int] = set()
    for name in names:
        sign = not any(letter.isalnum() for letter in name)
        own = {i for i, symbol in enumerate(symbols) if symbol == name or (sign and symbol.endswith(name))}
        if not own:
            raise UserError(
                f"'bipe:ends={'+'.join(names)}': no symbol of the dictionary is {'or ends in ' * sign}'{name}': name "
                "those that end a segment, as ends=</s> or ends=</s>+."
            )
        found |= own
    return sorted(found)


@register("bipe")
class Bipe(Encoding):
    """A vector for the place in a segment at the input, and rotation or penalty by segments; it reads the tokens.

    Segments end with a full stop or a line, or what ``ends`` names; the token that ends a segment belongs to it. The
    place t within a segment starts at 0 in each and is clipped at the table's end. Let n_i be the segment of token i,
    from 0: ``inter=rope`` rotates by n_i in place of i, ``inter=alibi`` adds -factor·k_h·(n_i - n_j). Counters follow
    from the tokens before, so that decoding goes on with the same ones; padding is not counted. Within a row all is
    counted from its first token, which in fairseq's rows is often the </s> of the line before: a segment of its own.
    """

    @dataclass(frozen=True)
    class Config:
        inter: str = option("rope", "what segments do in attention", choices=("rope", "alibi"))
        intra: str = option("learned", "vectors of places within a segment", choices=("learned", "sinusoidal"))
        ends: str = option(
            "</s>+.",
            "symbols that end a segment, joined by +; a sign also where a symbol ends in it; </s> is the line's end",
        )
        max_intra: int = option(1024, "learned: rows of the table; later places share the last", minimum=1)
        factor: float = option(96.0, "alibi: a step to the next segment weighs so many tokens", above=0)
        base: float = option(10000.0, "rope: b in θ_s = b^(-2s/d)", above=1)

    formula = "x + table[place in segment];  rope by n_i, or -96·k_h·(n_i - n_j),  n: number of the segment"
    paper = "He et al. 2024 (arXiv 2401.16421)"
    sharing_modes = ("model",)
    position_type = "none"
    needs_token_ids = True
    fixed_rotation = True
    ends: Tensor

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        return {"base": "base"} if config.inter == "rope" else {}

    def setup(self) -> None:
        cfg = self.config
        unread = (("factor",) if cfg.inter == "rope" else ("base",)) + ("max_intra",) * (cfg.intra == "sinusoidal")
        for f in fields(cfg):
            if f.name in unread and getattr(cfg, f.name) != f.default:
                raise UserError(f"'bipe:inter={cfg.inter},intra={cfg.intra}' does not read {f.name}: leave it out")
        if cfg.inter == "rope":
            self.between: Encoding = Rope(Rope.Config(base=cfg.base), self.heads, self.width)
        else:
            self.between = _Stepped(_Stepped.Config(), self.heads, self.width)
            self.between.factor = cfg.factor
            self.dependence = (
                "the bias falls by a number for each segment: Σ exp(bias) is at most m/(1 - e^-k) where no segment has "
                "more than m tokens and k is that number, and grows with the text where a segment does"
            )
        if cfg.intra == "learned":
            self.table: nn.Parameter | None = nn.Parameter(torch.randn(cfg.max_intra, self.width) * 0.02)
        else:
            self.table = None
            self.waves = Sinusoidal(Sinusoidal.Config(), self.heads, self.width)
        names = [name for name in cfg.ends.split("+") if name]
        known = [] if self.symbols is None else ids_of(names, self.symbols)
        self.register_buffer("ends", torch.tensor(known, dtype=torch.int64))

    def counted(self, pos: Positions) -> tuple[Tensor, Tensor]:
        """Segments and places of all tokens; see :func:`count`."""
        if pos.tokens is None:
            raise UserError(
                "'bipe' reads the tokens, which are not at hand here: train and evaluate it as a model, or give "
                "positions=Positions(..., tokens=ids)"
            )
        if not len(self.ends):
            raise UserError("'bipe' does not know which tokens end a segment: give build(...) the dictionary's symbols")
        return count(pos.tokens, self.ends)

    def prepare_positions(self, pos: Positions) -> Positions:
        segments = self.counted(pos)[0].to(pos.k.dtype)
        return Segments(segments[:, -pos.q.shape[1] :], segments, 1.0, contiguous=False)

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        check_embedded(x, pos, self.width)
        place = self.counted(pos)[1][:, -x.shape[1] :]
        if self.table is None:
            return x + self.waves.vectors(place.to(pos.k.dtype)).to(x.dtype)
        return x + F.embedding(place.clamp_max(len(self.table) - 1), self.table).to(x.dtype)

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        return self.between.rotate(x, at, _settled(pos), key)

    def position_bias(self, pos: Positions) -> Bias | None:
        return None if self.rotates else self.between.position_bias(_settled(pos))

    @property
    def rotates(self) -> bool:
        return self.config.inter == "rope"

    @property
    def adds_bias(self) -> bool:
        """Not of positions alone."""
        return False

    def log_bias_formulas(self) -> Any:
        return self.between.log_bias_formulas() if self.rotates else None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        given = state_dict.get(prefix + "ends")
        if isinstance(given, Tensor) and given.dim() == 1 and given.dtype == torch.int64:
            self.ends = torch.zeros_like(given, device=self.ends.device)  # what the model was trained with
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _settled(pos: Positions) -> Positions:
    if not isinstance(pos, Segments):
        raise UserError(
            "what 'bipe' does in attention depends on where the text's segments end, not on positions alone: call "
            "fairseq_rpe.attend with the tokens, or a model"
        )
    return pos
