"""Attention with any encoding for programs that have nothing but torch: a function, and a module with a cache."""

import itertools
import uuid
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_rpe.attention.backends import choose
from fairseq_rpe.attention.forward import carry_out, check_separable, counted, exactly, plan_of, separated
from fairseq_rpe.attention.kv_buffer import Room, followed
from fairseq_rpe.attention.validation import (
    check_documents,
    check_fit,
    check_input,
    check_notes,
    check_shapes,
    positions_of,
)
from fairseq_rpe.core.arguments import check_count, check_probability, described
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import canonical
from fairseq_rpe.encodings import Encoding, build
from fairseq_rpe.encodings.contract import check_contract

_PROCESS = uuid.uuid4().hex  # numbers of layers are of this process: a cache that was saved does not know them
_numbers = itertools.count()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | str,
    *,
    positions: Tensor | Positions | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    notes: Tensor | None = None,
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
            carry the tokens, for encodings that read them. They are computed in float64 where q is.
        padding: (B, m) bool, True at tokens that nobody may see. What they give themselves has no meaning.
        documents: (B, n) integers, with n = m: neighbours with one number are of one document, and a token sees and
            counts the tokens of its own document alone. Padding has a number of its own.
        notes: (B, H, m, E), what ``encoding.note`` made of the layer's inputs, of an encoding that reads them.
        causal: only True; it is here to say so.
        dropout: probability of dropping an attention weight, whether training or not.
        backend: ``auto`` or one of ``fairseq_rpe.attention.BACKENDS``.

    Returns:
        (B, H, n, D) in q's dtype, twice differentiable in q, k, v and the encoding's parameters. Second derivatives
        are those of the dense formula, in O(n²) memory; where a kernel has none, they raise an error.

    Raises:
        UserError: shapes, types or positions that do not fit, a spec that would need parameters, an encoding of your
            own that attention cannot use, or what the backend named cannot do. Nothing is approximated instead.

    >>> import torch
    >>> from fairseq_rpe import attend
    >>> q, k, v = torch.randn(3, 2, 4, 7, 16)
    >>> y = attend(q, k, v, "alibi")
    >>> y.shape
    torch.Size([2, 4, 7, 16])
    >>> torch.allclose(attend(q[:, :, 5:], k, v, "alibi"), y[:, :, 5:], atol=1e-6)
    True
    """
    check_shapes(q, k, v, padding)
    if causal is not True:
        raise UserError("attend is causal, as are the encodings: a query sees what is behind it; leave causal=True")
    check_probability("dropout", dropout)
    if not isinstance(encoding, Encoding | str):
        raise UserError(f"encoding is a spec such as 'alibi' or what build(...) returns, not {described(encoding)}")
    heads, width = q.shape[1], q.shape[3]
    made = _stateless(encoding, heads, heads * width) if isinstance(encoding, str) else encoding
    check_contract(made)
    check_fit(made, q)
    chosen = choose(backend, [made])
    n, m = q.shape[2], k.shape[2]
    check_notes(made, notes, q, m)
    padding = None if padding is None else padding.to(q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    last_query = None
    if documents is not None:
        check_documents(documents, q, m, positions, padding)
        check_separable(made)
        at, last_query = separated(documents.to(q.device), wide)
    elif positions is not None:
        at = positions_of(positions, made, q, m)
    elif padding is not None:
        at, padding = counted(padding, n, made.length_dependent, wide)
    else:
        at = Positions.arange(n, m, device=q.device, dtype=wide)
    return carry_out(q, k, v, plan_of(made, at, padding, chosen, last_query=last_query), dropout, notes)


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


@dataclass
class Cache:
    """Keys and values (B, H, m, D) of the m tokens that a ``RelativeAttention`` has seen, keys not turned; and notes.

    ``layer`` identifies the layer that filled it. Keys and values are views of ``rooms``, memory with room for more;
    without it, as after a change of k and v, they are copied.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    notes: Tensor | None = None
    rooms: tuple[Room | None, ...] = field(default=(None, None, None), repr=False)
    layer: tuple[str, int, str] | None = field(default=None, repr=False)  # process, number and encoding of its layer

    def __len__(self) -> int:
        return 0 if self.k is None else self.k.shape[2]

    def check_layer(self, layer: tuple[str, int, str]) -> None:
        """Check that a layer may continue what is in the cache.

        Of a layer of another process, where a saved cache is from, the encoding alone is compared.

        Raises:
            UserError: another layer filled it.
        """
        if not len(self) or self.layer is None:
            return
        compared = slice(0, 3) if self.layer[0] == layer[0] else slice(2, 3)
        if self.layer[compared] != layer[compared]:
            raise UserError(
                f"the cache is of another layer, with {self.layer[2]}, and this layer has {layer[2]}: each layer needs "
                "a cache of its own, of new_cache()"
            )

    def followed_by(self, layer: tuple[str, int, str], *new: Tensor | None) -> tuple[Tensor | None, ...]:
        """Its keys, values and notes and then these (B, H, n, D) of a layer.

        Raises:
            UserError: the cache is of another batch or another layer, or of another dtype or device.
        """
        old = self.k, self.v, self.notes
        if old[0] is None or new[0] is None:
            return new
        if len(old[0]) != len(new[0]):
            raise UserError(
                f"the cache holds {len(old[0])} rows and {len(new[0])} came: use a new cache for a new batch"
            )
        for name, x, y in zip(("keys", "values", "notes"), old, new, strict=True):
            held, added = _kind(x), _kind(y)
            if held != added:
                raise UserError(
                    f"the cache holds {name} ({held}), and this layer adds {name} ({added}): each layer needs a cache "
                    "of its own, in one dtype and on one device"
                )
        self.check_layer(layer)
        all_of = zip(self.rooms, old, new, strict=True)
        found = [(y, None) if x is None or y is None else followed(room, x, y) for room, x, y in all_of]
        self.rooms = tuple(room for _, room in found)
        return tuple(x for x, _ in found)


def _kind(x: Tensor | None) -> str:
    return "none" if x is None else f"{x.shape[1]} heads of width {x.shape[3]}, {x.dtype} on {x.device}"


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
        UserError: an argument is of another type or out of range, heads do not divide the width, the spec is wrong or
            one of an absolute encoding, which acts at a model's input, or the backend does not serve it.

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
        check_count("width", width)
        check_count("heads", heads)
        check_count("length", length, optional=True)
        check_probability("dropout", dropout)
        if not isinstance(bias, bool):
            raise UserError(f"bias is True or False, not {described(bias)}")
        if not isinstance(encoding, Encoding | str):
            raise UserError(f"encoding is a spec such as 'alibi' or what build(...) returns, not {described(encoding)}")
        if width % heads:
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
        check_contract(encoding)
        choose(backend, [encoding])
        self.width, self.heads, self.dropout, self.backend = width, heads, dropout, backend
        self.encoding = encoding
        self._number = _PROCESS, next(_numbers)
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
        documents: Tensor | None = None,
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
            documents: as in ``attend``, without a cache.

        Raises:
            UserError: x is not (B, n, C) in the layer's dtype and on its device, the cache is of another batch or
                layer, documents come with a cache, or what ``attend`` refuses.
        """
        check_input(x, self.width, getattr(self.q_proj, "weight", None))
        if cache is not None and not isinstance(cache, Cache):
            raise UserError(f"cache is what new_cache() returns, or None, not {described(cache)}")
        if documents is not None and cache is not None:
            raise UserError("a text that goes on from a cache is one document: leave documents or the cache out")
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        with exactly(x):
            notes = self.encoding.token_features(x)
        if cache is not None:
            layer = (*self._number, canonical(type(self.encoding).__name__, self.encoding.config))
            k, v, notes = cache.followed_by(layer, k, v, notes)
        out = attend(
            q,
            k,
            v,
            self.encoding,
            positions=positions,
            padding=padding,
            documents=documents,
            notes=notes,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        if cache is not None:  # only now: what was refused is not in it
            cache.layer = layer
            cache.k, cache.v, cache.notes = k, v, notes
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, dropout={self.dropout}, backend={self.backend}"
