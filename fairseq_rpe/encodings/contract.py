"""Checks a user's encoding before it is used: what its hooks return for small inputs, and the line that is wrong.

Each hook is called on a copy of the encoding with about a dozen tokens, which takes milliseconds. Encodings of this
package are not checked at run time; a test runs the same checks on all of them.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions, block, column_of
from fairseq_rpe.core.contract import FAR, check_names, is_shipped, refuse, untouched_random_state
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.encodings.base import Absolute, DistanceBias, Encoding, PairwiseBias, Rotary
from fairseq_rpe.encodings.contract_values import WIDE, Declined, Hooks, first_nonfinite

_HOOKS = (
    "embed",
    "rotate",
    "value",
    "position_bias",
    "content_bias",
    "transform_scores",
    "relative_values",
    "prepare_positions",
    "rotation",
    "token_features",
    "rotation_regions",
)
_OTHERS: tuple[str, ...] = (
    "setup",
    "log_bias_formulas",
    "logged_scalars",
    "bias_profile",
    "Config",
    "formula",
    "paper",
    "sharing_modes",
    "tie",
)
_OTHERS += (
    "position_type",
    "max_queries_per_call",
    "length_dependent",
    "needs_token_ids",
    "fixed_rotation",
    "bounded_reason",
    "dependence",
)
# by family: methods of which one is enough, and further names that belong to it
_FAMILIES: dict[type[Encoding], tuple[tuple[str, ...], tuple[str, ...]]] = {
    DistanceBias: (("bias", "head_bias", "position_bias"), ("head_parameters",)),
    PairwiseBias: (("bias", "position_bias"), ()),
    Rotary: (("angles", "rotate", "rotation"), ("amplitude", "interleaved", "rotary_fraction", "whole")),
    Absolute: (("vectors", "embed"), ()),
    Encoding: (_HOOKS, ()),
}
_SQUARE = ("rotate", "position_bias", "content_bias", "transform_scores", "relative_values")  # (…, queries, keys)
_OF_QUERY = ("embed", "token_features")  # (…, queries, width); of values all keys
_checked: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def check_contract(encoding: Encoding, symbols: int = 0) -> None:
    """Check what the hooks of a user's encoding return, once for each class, its options and sizes in a process.

    The check covers names near to those of hooks; shapes, dtypes and devices; values at distance 0 and far away;
    gradients; and that one query of the first tokens, as in decoding, gets what it gets in a pass over all tokens. The
    encoding, its parameters and all random states stay as they are.

    Args:
        encoding: any encoding; those of this package are not checked.
        symbols: size of the dictionary, 0 where it is unknown; hooks of an encoding that reads tokens need one.

    Raises:
        ContractError: a method is missing, misspelt or fails, or returns something that attention cannot use. It is a
            UserError that names class and method, what was returned, what was expected, and the author's file and line.
    """
    cls = type(encoding)
    if is_shipped(cls) or torch.compiler.is_compiling():
        return
    device = _device(encoding)
    done = _checked.setdefault(cls, set())
    key = f"{encoding.config!r} {encoding.heads} {encoding.width} {encoding.length} {symbols} {device.type}"
    if key not in done:
        check(encoding, symbols)
        if device.type != "meta" and (symbols or not encoding.needs_token_ids):
            done.add(key)


def check(encoding: Encoding, symbols: int = 0) -> None:
    """:func:`check_contract`, also of encodings of this package and of those that have been checked before."""
    check_class(encoding)
    device = _device(encoding)
    if device.type == "meta" or (encoding.needs_token_ids and not symbols):
        return
    with (
        untouched_random_state(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        with suppress(RuntimeError, TypeError):  # not everything that an author keeps can be copied
            encoding = copy.deepcopy(encoding)
        training = encoding.training
        try:
            _Check(encoding.eval(), symbols, device).run()
        finally:
            encoding.train(training)


def check_class(encoding: Encoding) -> None:
    """Refuse a class that lacks the method of its family, or has a name near to a hook's.

    Raises:
        ContractError: names the class, the method and the near name.
    """
    cls = type(encoding)
    if is_shipped(cls):
        return
    family = next(one for one in _FAMILIES if isinstance(encoding, one))
    required, optional = _FAMILIES[family]
    set_later = any(name in vars(encoding) for name in _HOOKS)
    inherited = any(is_shipped(base) and base not in _FAMILIES for base in cls.__mro__[: cls.__mro__.index(family)])
    check_names(cls, family, required, (*optional, *_HOOKS, *_OTHERS), filled=set_later or inherited)
    if cls.position_type not in ("any", "whole", "none"):
        refuse(cls, None, f"has positions = {cls.position_type!r}, expected 'any', 'whole' or 'none'")
    if isinstance(encoding, Rotary) and not hasattr(encoding, "rotated"):
        refuse(cls, "setup", "does not call super().setup(), which prepares the rotation: call it")


def _device(encoding: Encoding) -> torch.device:
    first = next(encoding.parameters(), next(encoding.buffers(), None))
    return torch.get_default_device() if first is None else first.device


class _Check(Hooks):
    """The steps of the check, each with inputs of its own."""

    def __init__(self, encoding: Encoding, symbols: int, device: torch.device) -> None:
        super().__init__(encoding, symbols, device)
        self.generator = torch.Generator().manual_seed(1)
        double = any(p.dtype == torch.float64 for p in encoding.parameters())
        self.dtypes = WIDE[1:] if double else WIDE  # parameters in float64 meet no narrower positions

    def run(self) -> None:
        for dtype in self.dtypes:
            for near in (True, False):
                self._unless_declined(self._family, dtype, near)
        for dtype in self.dtypes:
            self._unless_declined(self._plain, dtype)
        if self.encoding.position_type != "none":
            self._unless_declined(self._uneven)
        self._unless_declined(self._gradients)
        self._unless_declined(self._decoding)
        self._unless_declined(self._reports)

    def _unless_declined(self, step: Callable[..., None], *args: Any) -> None:
        with suppress(Declined):
            step(*args)

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64, device="cpu").to(self.device, dtype)

    def _inputs(self, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
        """x (B, n, C), and q, k and v (B, H, n, D)."""
        shape = rows, self.heads, self.tokens, self.head
        heads = {name: self._random(*shape, dtype=dtype) for name in ("q", "k", "v")}
        return {"x": self._random(rows, self.tokens, self.width, dtype=dtype), **heads}

    def _positions(self, k: Tensor, queries: int | None = None, rows: int = 1, **kind: Any) -> Positions:
        """Positions k (B or 1, m) of all tokens, the last of which are queries, with ids where they are read."""
        m, ids = k.shape[1], None
        if self.encoding.needs_token_ids:
            ids = (torch.arange(rows * m, device=self.device) % self.symbols).view(rows, m)
        return Positions(k[:, m - (queries or m) :], k, tokens=ids, **kind)

    def _arange(self, dtype: torch.dtype, m: int | None = None, queries: int | None = None, rows: int = 1) -> Positions:
        k = torch.arange(m or self.tokens, device=self.device, dtype=dtype)[None]
        return self._positions(k, queries, rows)

    def _family(self, dtype: torch.dtype, near: bool) -> None:
        """The one method that a family asks for, at the first positions or distances or, not ``near``, at some far."""
        encoding, cls = self.encoding, self.cls

        def numbers(count: int) -> Tensor:
            first = torch.arange(count, device=self.device, dtype=dtype)
            return first if near else torch.cat([first[: -len(FAR)], first.new_tensor(FAR)])

        if isinstance(encoding, DistanceBias) and cls.position_bias is DistanceBias.position_bias:
            self.log_bias(encoding, numbers(self.distances))
            return
        pos = self._positions(numbers(self.tokens)[None], step=1.0, contiguous=near)
        if isinstance(encoding, PairwiseBias) and cls.position_bias is PairwiseBias.position_bias:
            self.bias("bias", self.call("bias", pos.q, pos.k), pos, (dtype,))
        elif isinstance(encoding, Rotary) and self.overrides(Rotary, "angles"):
            pairs = encoding.rotated // 2
            self.tensor("angles", self.call("angles", pos.k, pos), [(1, self.tokens, pairs)], (dtype,))
            for key in (False, True):
                output = self.call("amplitude", pos.k, pos, key)
                if output is not None and (
                    near or encoding.max_queries_per_call is None
                ):  # it has the range of some queries
                    widths = (1,) if encoding.whole else (1, pairs)
                    shapes = [(1, n, width) for n in (1, self.tokens) for width in widths]
                    self.tensor("amplitude", output, shapes, WIDE)
        elif isinstance(encoding, Absolute) and self.overrides(Absolute, "vectors"):
            self.tensor("vectors", self.call("vectors", pos.k), [(1, self.tokens, self.width)], WIDE)

    def _plain(self, dtype: torch.dtype) -> None:
        """All hooks at plain positions."""
        for _ in self._call_hooks(self._inputs(dtype, 2), self._arange(dtype, rows=2)):
            pass

    def _uneven(self) -> None:
        """All hooks where each row has its own spacing, of fractions too where they have a meaning."""
        dtype, whole = self.dtypes[0], self.encoding.position_type == "whole"
        steps = 1.0 + torch.arange(2 * self.tokens, device=self.device, dtype=dtype).view(2, -1) % 3
        k = (steps if whole else steps * 0.375).cumsum(1)
        pos = self._positions(k - k[:, :1], rows=2, step=1.0 if whole else None, contiguous=False)
        for _ in self._call_hooks(self._inputs(dtype, 2), pos):
            pass

    def _call_hooks(self, tensors: dict[str, Tensor], pos: Positions) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Call every hook and check what it returns: its name, its values, and the input that they depend on."""
        x, q, k, v = (tensors[name] for name in ("x", "q", "k", "v"))
        if self.has("embed"):
            output = self.call("embed", x, pos)
            self.tensor("embed", output, [tuple(x.shape)], (x.dtype,))
            yield "embed", output, x
        pos = self.prepared_positions(pos)
        notes = self.token_features(x) if self.has("token_features") else None
        if self.has("rotate") or self.has("rotation"):
            rotate, (of_queries, of_keys) = self.call("rotation", pos), self.rotation_positions(pos)
            if rotate is not None:
                pairs = [(q, at, False) for at in of_queries] + [(k, at, True) for at in of_keys]
                for source, at, key in pairs:
                    output = self.call("rotate", source, at, pos, function=rotate, key=key)
                    self.tensor("rotate", output, [tuple(source.shape)], (source.dtype,))
                    yield "rotate", output, source
        if self.has("value"):
            output = self.call("value", v, pos)
            self.tensor("value", output, [tuple(v.shape)], (v.dtype,))
            yield "value", output, v
        if self.has("position_bias") and (form := self.call("position_bias", pos)) is not None:
            yield self.author("position_bias"), self._bias("position_bias", form, pos, 0), None
        if self.has("content_bias") and (form := self.call("content_bias", q, k, pos, notes)) is not None:
            yield "content_bias", self._bias("content_bias", form, pos, len(q)), None
        if self.has("transform_scores") and self.encoding.transform_scores is not None:
            yield "transform_scores", self.remapped_weights(q, k, pos), q
        if self.has("relative_values") and (reading := self.relative_values(pos)) is not None:
            yield "relative_values", reading.vectors, None

    def _bias(self, method: str, form: Any, pos: Positions, rows: int) -> Tensor:
        """(B or 1, H, n, m) of a form that a hook returned."""
        method = self.author(method)
        self.position_bias(method, form, pos, rows)
        output: Tensor = self.call(method, form, pos, function=block)
        self.bias(method, output, pos, WIDE, rows)
        return output

    def _gradients(self) -> None:
        """A finite gradient reaches the input of each hook, and all parameters."""
        dtype, reached = self.dtypes[0], set[str]()
        tensors = {name: x.requires_grad_() for name, x in self._inputs(dtype, 2).items()}
        learned = {name: p for name, p in self.encoding.named_parameters() if p.requires_grad}
        for method, output, source in self._call_hooks(tensors, self._arange(dtype, rows=2)):
            weights = self._random(*output.shape, dtype=output.dtype)
            # attention takes no gradient from what is hidden
            loss = (output.masked_fill(output.isneginf(), 0.0) * weights).sum()
            inputs = {"its input": source} if source is not None else {}
            wanted = {**inputs, **{f"its parameter '{name}'": p for name, p in learned.items()}}
            grads: tuple[Tensor | None, ...] = ()
            if loss.requires_grad and wanted:  # hooks may share a graph
                grads = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True, retain_graph=True)
            for name, grad in zip(wanted, grads, strict=False):
                if grad is not None and not bool(torch.isfinite(grad).all()):
                    self.refuse(method, f"has the gradient {first_nonfinite(grad)} for {name}, expected a finite one")
            if source is not None and (not grads or grads[0] is None):
                self.refuse(method, "passes no gradient to its input: do not detach it")
            of_learned = grads[len(inputs) :]
            reached |= {name for name, grad in zip(learned, of_learned, strict=False) if grad is not None}
        lost = [f"'{name}'" for name in learned if name not in reached]
        if lost:
            text = f"has parameters that get no gradient ({', '.join(lost)}): its hooks detach or do not use them"
            if isinstance(self.encoding, Rotary) and self.cls.rotate is Rotary.rotate:
                text += ", and Rotary.rotate makes angles without gradients, so learned ones need a rotate of their own"
            refuse(self.cls, None, text)

    @torch.no_grad()
    def _decoding(self) -> None:
        """One query of the first m tokens, as a cache has them, gets what it gets in a pass over all n."""
        n, tensors = self.tokens, self._inputs(torch.float64, 1)
        full = self._outputs(tensors, self._arange(torch.float64), 0)
        for last in (n // 2, n - 1):
            if last < n - 1 and self.encoding.length_dependent:  # earlier tokens then may change with later ones
                continue
            m = last + 1
            first = {name: x[..., :m, :] for name, x in tensors.items()}
            decoded = self._outputs(first, self._arange(torch.float64, m, queries=1), last)
            if [method for method, _ in decoded] != [method for method, _ in full]:
                refuse(self.cls, None, f"has other hooks for {m} tokens than for {n}: let a hook always return a bias")
            for (method, whole), (_, one) in zip(full, decoded, strict=True):
                if method in _SQUARE:
                    expected = whole[..., last : last + 1, :m]
                else:
                    expected = whole[..., last : last + 1, :] if method in _OF_QUERY else whole[..., :m, :]
                if method in ("position_bias", "content_bias"):  # softmax does not see what all keys of a query share
                    expected, one = (x - x[..., -1:] for x in (expected, one))
                of = f"one query of {m} tokens, as in decoding,"
                self._same(self.author(method), expected, one, of, f"all {n} tokens")
        self._check_cached(tensors["k"])

    def _outputs(self, tensors: dict[str, Tensor], pos: Positions, first: int) -> list[tuple[str, Tensor]]:
        """What attention gets of each hook, by name, for the tokens from ``first`` on as queries."""
        x, q, k, v = tensors["x"], tensors["q"][:, :, first:], tensors["k"], tensors["v"]
        outputs: list[tuple[str, Tensor]] = []
        if self.has("embed"):
            outputs.append(("embed", self.call("embed", x[:, first:], pos)))
        pos = self.prepared_positions(pos)
        notes = self.token_features(x) if self.has("token_features") else None
        if notes is not None and (features := self.token_features(x[:, first:])) is not None:
            outputs.append(("token_features", features))
        if self.has("rotate") or self.has("rotation"):
            rotate, (of_queries, of_keys) = self.call("rotation", pos), self.rotation_positions(pos)
            if rotate is not None:
                queries = [self.call("rotate", q, at, pos, function=rotate) for at in of_queries]
                keys = [self.call("rotate", k, at, pos, function=rotate, key=True) for at in of_keys]
                # products alone count: an encoding may move a factor from queries to keys, as xPos does
                outputs += [("rotate", torch.matmul(a, b.mT)) for a, b in zip(queries, keys, strict=True)]
                q, k = (queries[0], keys[0]) if len(queries) == 1 else (q, k)
        if self.has("value"):
            outputs.append(("value", self.call("value", v, pos)))
        if self.has("position_bias") and (form := self.call("position_bias", pos)) is not None:
            outputs.append(("position_bias", self._bias("position_bias", form, pos, 0)))
        if self.has("content_bias") and (form := self.call("content_bias", q, k, pos, notes)) is not None:
            outputs.append(("content_bias", self._bias("content_bias", form, pos, len(q))))
        if self.has("transform_scores") and self.encoding.transform_scores is not None:
            outputs.append(("transform_scores", self.remapped_weights(q, k, pos)))
        if self.has("relative_values") and (reading := self.relative_values(pos)) is not None:
            vectors = reading.vectors[:, column_of(reading, pos.q, pos.k)[0]]  # (H or 1, n, m, D)
            outputs.append(("relative_values", vectors.sum(-1)))
        return outputs

    def _check_cached(self, k: Tensor) -> None:
        """What decoding keeps does not change as tokens come: rotated keys, and the table of a distance bias."""
        n, dtype = self.tokens, torch.float64
        if self.encoding.rotates and self.encoding.fixed_rotation:
            rotated_keys = []
            for m in (n // 2, n):
                pos = self.prepared_positions(self._arange(dtype, m))
                rotated_keys.append(self.call("rotate", k[:, :, :m], pos.k, pos, key=True)[:, :, : n // 2])
            early, late = rotated_keys
            self._same("rotate", late, early, f"keys of {n // 2} tokens", f"{n}", "set rotation_is_fixed = False")
        if self.encoding.is_distance_bias:
            tables = [self.call("position_bias", self._arange(dtype, m, queries=1)).table[:, :n] for m in (n, 2 * n)]
            name = self.author("position_bias")
            self._same(name, tables[1], tables[0], f"{n} distances", f"{2 * n}", "set reads_length = True")

    def _same(self, method: str, expected: Tensor, output: Tensor, of: str, other: str, remedy: str = "") -> None:
        remedy = remedy or "let it read earlier tokens alone, or set reads_length = True"
        a, b = torch.broadcast_tensors(expected, output)
        hidden = a.isneginf(), b.isneginf()
        a, b = (x.masked_fill(h, 0.0) for x, h in zip((a, b), hidden, strict=True))
        scale = max(1.0, float(a.abs().max()))
        if not torch.equal(*hidden) or not torch.allclose(a, b, rtol=1e-5, atol=1e-5 * scale):
            gap = f"up to {float((a - b).abs().max()):.2g} apart" if torch.equal(*hidden) else "-inf in one of them"
            self.refuse(method, f"gives {of} other values than {other} ({gap}): {remedy}")

    def _reports(self) -> None:
        """What commands show of an encoding: learned quantities, and its formula of each head."""
        scalars = self.call("logged_scalars")
        if not isinstance(scalars, dict):
            self.returned("logged_scalars", scalars, "a dict of tensors")
        for one in scalars.values():
            self.tensor("logged_scalars", one, [(self.heads,), ()], (*WIDE, torch.int64), finite=False)
        if not self.overrides(Encoding, "log_bias_formulas") or (series := self.call("log_bias_formulas")) is None:
            return
        if not isinstance(series, list) or not all(isinstance(one, str | LogBias) for one in series):
            self.returned("log_bias_formulas", series, f"a list of {self.heads} formulas or None")
        if len(series) != self.heads:
            self.refuse(
                "log_bias_formulas", f"returned {len(series)} formulas, expected {self.heads}, one for each head"
            )
