"""Attention with any encoding for programs that have nothing but torch: a function, and a module with a cache."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core import Positions, UserError
from ..encodings import Encoding, build
from .layer import carry_out, counted, plan_of
from .room import Room, followed
from .select import choose

WHOLE = 1 << 24  # float32 holds every whole number up to here


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | str,
    *,
    positions: Tensor | Positions | None = None,
    padding: Tensor | None = None,
    causal: bool = True,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Causal attention with an encoding: ``softmax(q·kᵀ / sqrt(D) + bias) v``, or with q and k turned first.

    B is the batch, H the heads, D a head's width; n queries are the last of m >= n tokens, so that n < m continues a
    text whose keys are kept. Query i sees key j where j is at or before i, by index. A log-bias is in nats and is
    added, so a penalty is negative: ALiBi's is -slope·(i - j). Scores and softmax are float32 or better.

    Args:
        q: (B, H, n, D), neither scaled nor turned.
        k: (B, H, m, D), in q's dtype and on its device.
        v: the same.
        encoding: what ``fairseq_rpe.build(spec, heads=H, width=H·D)`` made, or the spec itself, such as ``"alibi"``,
            where nothing is learned. Of an absolute encoding this is the part in attention, which is none:
            ``encoding.embed`` adds its vectors at a model's input.
        positions: (m,) or (B, m) of the tokens, at least 0 and never falling, or a ``Positions``; None: 0 … m-1,
            counted without padding. A tensor's spacing is looked at in each call, a ``Positions`` says its own, and may
            carry the tokens, for encodings that read them.
        padding: (B, m) bool, True at tokens that nobody may see. What they give themselves has no meaning.
        causal: only True; it is here to say so.
        dropout: probability of dropping an attention weight, whether training or not.
        backend: ``auto`` or one of ``fairseq_rpe.attention.BACKENDS``.

    Returns:
        (B, H, n, D) in q's dtype, differentiable in q, k, v and the encoding's parameters.

    Raises:
        UserError: shapes, types or positions that do not fit, a spec that would need parameters, or what the backend
            named cannot do. Nothing is approximated instead.

    >>> import torch
    >>> from fairseq_rpe import attend
    >>> q, k, v = torch.randn(3, 2, 4, 7, 16)
    >>> y = attend(q, k, v, "alibi")
    >>> y.shape
    torch.Size([2, 4, 7, 16])
    >>> torch.allclose(attend(q[:, :, 5:], k, v, "alibi"), y[:, :, 5:], atol=1e-6)
    True
    """
    _check_shapes(q, k, v, padding)
    if not causal:
        raise UserError("attend is causal, as are the encodings: a query sees what is behind it; leave causal=True")
    if not 0 <= dropout < 1:
        raise UserError(f"dropout is a probability from 0 to below 1, not {dropout:g}")
    heads, width = q.shape[1], q.shape[3]
    made = _stateless(encoding, heads, heads * width) if isinstance(encoding, str) else encoding
    _check_fit(made, q)
    chosen = choose(backend, remaps=made.remap is not None)
    n, m = q.shape[2], k.shape[2]
    padding = None if padding is None else padding.to(q.device)
    if positions is not None:
        at = _positions(positions, made, q, m)
    elif padding is not None:
        at, padding = counted(padding, n, made.reads_length)
    else:
        at = Positions.arange(n, m, device=q.device)
    return carry_out(q, k, v, plan_of(made, at, padding, chosen), dropout)


def _stateless(spec: str, heads: int, width: int) -> Encoding:
    made = build(spec, heads, width)
    if made.embeds:
        raise UserError(
            f"'{spec}' acts at a model's input, not in attention: add it there with build(...).embed, and attend with "
            "that encoding or 'nope'"
        )
    if next(made.parameters(), None) is not None:
        raise UserError(
            f"'{spec}' is learned, and a string would throw its parameters away: keep build('{spec}', heads={heads}, "
            f"width={width}) in your model and pass it"
        )
    return made


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> None:
    shown = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if any(x.dim() != 4 for x in (q, k, v)) or not q.numel():
        raise UserError(f"q, k and v are (batch, heads, tokens, head width), none of them 0; these are {shown}")
    batch, heads, n, width = q.shape
    m = k.shape[2]
    if k.shape != v.shape or k.shape != (batch, heads, m, width):
        raise UserError(f"q, k and v differ in more than q's tokens: {shown}; repeat keys that heads share")
    if n > m:
        raise UserError(f"{n} queries and {m} keys: the queries are the last of the tokens, so give all keys")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or not q.is_floating_point():
        given = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)).replace("torch.", "")
        raise UserError(f"q, k and v are {given}: give them one floating-point dtype and one device")
    if padding is not None and (padding.shape != (batch, m) or padding.dtype != torch.bool):
        raise UserError(f"padding is bool of shape {(batch, m)}, not {padding.dtype} of {tuple(padding.shape)}")


def _check_fit(encoding: Encoding, q: Tensor) -> None:
    heads, width = q.shape[1], q.shape[3]
    own = encoding.width // encoding.heads
    if encoding.heads != heads or (encoding.rotates and own != width):
        raise UserError(
            f"the encoding is for {encoding.heads} heads of width {own}, q has {heads} of {width}: "
            f"build it with heads={heads}, width={heads * width}"
        )
    first = next(encoding.parameters(), None)
    if first is not None and first.device != q.device:
        raise UserError(f"the encoding is on {first.device} and q on {q.device}: move it with encoding.to(q.device)")


def _positions(given: Tensor | Positions, encoding: Encoding, q: Tensor, m: int) -> Positions:
    """Positions as given, checked; of a tensor, with what their spacing is."""
    batch, n = q.shape[0], q.shape[2]
    if isinstance(given, Positions):
        if given.k.shape not in ((1, m), (batch, m)) or given.q.shape != (len(given.k), n):
            raise UserError(
                f"positions of {tuple(given.q.shape)} queries and {tuple(given.k.shape)} keys, where attention has "
                f"{(batch, n)} and {(batch, m)}: give those of these tokens"
            )
        return given
    if given.shape not in ((m,), (1, m), (batch, m)):
        raise UserError(f"positions are of shape {(m,)} or {(batch, m)}, not {tuple(given.shape)}")
    if given.dtype in (torch.bool, torch.float16, torch.bfloat16) or given.is_complex():
        raise UserError(f"positions in {given.dtype} lose digits: use torch.int64 or torch.float32")
    k = given.to(q.device).reshape(-1, m)
    if not bool(torch.isfinite(k).all() & (k >= 0).all() & (k.diff(dim=1) >= 0).all()):
        raise UserError("positions are 0 or more and never fall along a row: sort the tokens by them")
    if not k.is_floating_point():
        if int(k.max()) > WHOLE:
            raise UserError(f"position {int(k.max())} is beyond {WHOLE}, what float32 can count: use torch.float64")
        k = k.float()
    whole = bool((k == k.round()).all())
    if encoding.positions == "whole" and not whole:
        raise UserError(f"{type(encoding).__name__} accepts whole positions only: round these, or use another encoding")
    even = whole and bool((k.diff(dim=1) == 1).all())
    return Positions(k[:, m - n :], k, 1.0 if whole else None, contiguous=even)


@dataclass
class Cache:
    """Keys and values (B, H, m, D) of the m tokens that a ``RelativeAttention`` has seen, keys not turned.

    They are views of ``rooms``, memory with room for more; without it, as after a change of k and v, they are copied.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    rooms: tuple[Room | None, Room | None] = field(default=(None, None), repr=False)

    def __len__(self) -> int:
        return 0 if self.k is None else self.k.shape[2]

    def followed_by(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Its keys and values and then these. Raises UserError: another batch than before."""
        if self.k is None or self.v is None:
            return k, v
        if len(self.k) != len(k):
            raise UserError(f"the cache holds {len(self.k)} rows and {len(k)} came: use a new cache for a new batch")
        (k, for_k), (v, for_v) = followed(self.rooms[0], self.k, k), followed(self.rooms[1], self.v, v)
        self.rooms = for_k, for_v
        return k, v


class RelativeAttention(nn.Module):
    """Causal multi-head self-attention with an encoding: projections, ``attend``, and a cache for decoding.

    ``out_proj(attend(q_proj(x), k_proj(x), v_proj(x), encoding))``, heads split and joined in between. C is the model
    width, H the heads, D = C/H.

    Args:
        width: C.
        heads: H, which divides C.
        encoding: a spec, ``"alibi"`` or ``"kerple_log"``: this layer then has an encoding of its own, learned
            parameters included; or an encoding, which several layers may share.
        length: training length in tokens, for a spec that reads it.
        dropout: probability of dropping an attention weight in training.
        bias: whether the four projections have one.
        backend: as in ``attend``.

    Raises:
        UserError: heads do not divide the width, the spec is wrong or one of an absolute encoding, which acts at a
            model's input, or the backend does not serve it.

    >>> import torch
    >>> from fairseq_rpe import RelativeAttention
    >>> _ = torch.manual_seed(0)
    >>> layer = RelativeAttention(width=64, heads=4, encoding="kerple_log")
    >>> x = torch.randn(2, 7, 64)
    >>> y = layer(x)
    >>> cache = layer.new_cache()
    >>> one_by_one = [layer(token, cache) for token in x.split(1, dim=1)]
    >>> torch.allclose(torch.cat(one_by_one, dim=1), y, atol=1e-6)
    True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        encoding: Encoding | str,
        *,
        length: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if heads < 1 or width < 1 or width % heads:
            raise UserError(f"{heads} heads do not divide a model width of {width}: choose another number of heads")
        if isinstance(encoding, str):
            spec, encoding = encoding, build(encoding, heads, width, length)
            if encoding.embeds:
                raise UserError(
                    f"'{spec}' acts at a model's input, not in attention: add it there with build(...).embed, and use "
                    "that encoding or 'nope' here"
                )
        elif encoding.heads != heads or encoding.width != width:
            raise UserError(
                f"the encoding is for {encoding.heads} heads and width {encoding.width}, this layer has {heads} and "
                f"{width}: build it with heads={heads}, width={width}"
            )
        choose(backend, remaps=encoding.remap is not None)
        self.width, self.heads, self.dropout, self.backend = width, heads, dropout, backend
        self.encoding = encoding
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width, bias) for _ in range(4))

    def new_cache(self) -> Cache:
        """An empty cache for one batch of rows; each layer needs its own."""
        return Cache()

    def forward(
        self,
        x: Tensor,
        cache: Cache | None = None,
        *,
        positions: Tensor | Positions | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Tokens x (B, n, C) -> (B, n, C); with a cache they go on from those in it, and are added to it.

        With the cache the result is that of one pass over all tokens so far. Where an encoding reads the length of the
        row (dynamic NTK, ``factor=auto``), a later token changes what a full pass gives to earlier ones; what has been
        decoded stays as it was.

        Args:
            x: (B, n, C), the new tokens.
            cache: of ``new_cache``, the tokens before them.
            positions: as in ``attend``, of all m tokens, those in the cache included.
            padding: likewise.

        Raises:
            UserError: x is not (B, n, C), its batch is not the cache's, or what ``attend`` refuses.
        """
        if x.dim() != 3 or x.shape[2] != self.width:
            raise UserError(f"x is (batch, tokens, {self.width}), not {tuple(x.shape)}")
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = cache.followed_by(k, v)
        dropout = self.dropout if self.training else 0.0
        backend = self.backend
        out = attend(q, k, v, self.encoding, positions=positions, padding=padding, dropout=dropout, backend=backend)
        if cache is not None:  # only now: what was refused is not in it
            cache.k, cache.v = k, v
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, dropout={self.dropout}, backend={self.backend}"
