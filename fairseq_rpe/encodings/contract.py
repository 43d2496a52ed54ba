"""Checks a user's encoding before it is used, by calling each of its hooks with small inputs.

The hooks of a copy of the encoding are called with about a dozen tokens, which takes milliseconds. Encodings of this
package are not checked at run time; a test runs the same checks on all of them.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.bias import table_index
from fairseq_rpe.core.contract import (
    FAR_DISTANCES,
    check_hook_names,
    is_shipped,
    preserve_random_state,
    raise_contract_error,
)
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings.base import Absolute, DistanceBias, Encoding, PairwiseBias, Rotary
from fairseq_rpe.encodings.contract_values import HOOKS, OTHER_NAMES, WIDE, Declined, HookProbe, first_nonfinite

# family -> methods of which an author must define at least one, and further names of the family
_FAMILIES: dict[type[Encoding], tuple[tuple[str, ...], tuple[str, ...]]] = {
    DistanceBias: (("bias", "head_bias", "position_bias"), ("head_parameters",)),
    PairwiseBias: (("bias", "position_bias"), ()),
    Rotary: (("angles", "rotate", "rotation"), ("amplitude", "interleaved", "rotary_fraction", "scale_whole_head")),
    Absolute: (("vectors", "embed"), ()),
    Encoding: (HOOKS, ()),
}
# hooks by the shape that _outputs returns for them
# (…, queries, keys)
_SQUARE = ("rotate", "position_bias", "content_bias", "score_product", "transform_scores", "relative_values")
_BY_QUERY = ("embed", "token_features")  # (…, queries, width); ``value`` is (…, keys, width)
# by class: the options, sizes and devices for which it has passed the check
_checked: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def check_contract(encoding: Encoding, symbols: int = 0) -> None:
    """Check what the hooks of a user's encoding return, once per process for each class, its options and sizes.

    The check covers misspelt names of hooks; shapes, dtypes and devices; values at distance 0 and at large distances;
    gradients; and that one query of the first tokens, as in decoding, gives the same as a pass over all tokens. The
    encoding, its parameters and all random states are not changed.

    Args:
        encoding: any encoding; those of this package are skipped.
        symbols: number of symbols of the dictionary, or 0 if unknown; the hooks of an encoding that needs token ids are
            not checked without it.

    Raises:
        ContractError: a method is missing, misspelt or fails, or returns what attention cannot use. It is a UserError
            that names class and method, the returned and the expected value, and the author's file and line.
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
    """Run :func:`check_contract` also for encodings of this package and for those already checked.

    Args:
        encoding: any encoding.
        symbols: number of symbols of the dictionary, or 0 if unknown.

    Raises:
        ContractError: a method is missing, misspelt or fails, or returns what attention cannot use.
    """
    check_class(encoding)
    device = _device(encoding)
    if device.type == "meta" or (encoding.needs_token_ids and not symbols):
        return
    with (
        preserve_random_state(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        # a user's class may have attributes that cannot be copied; then the encoding itself is checked
        with suppress(RuntimeError, TypeError):
            encoding = copy.deepcopy(encoding)
        training = encoding.training
        try:
            _ContractCheck(encoding.eval(), symbols, device).run()
        finally:
            encoding.train(training)


def check_class(encoding: Encoding) -> None:
    """Refuse a class without the required method of its family, or with a misspelt hook.

    Args:
        encoding: an instance of the class.

    Raises:
        ContractError: the class lacks a method or has a misspelt one; the message names class and method.
    """
    cls = type(encoding)
    if is_shipped(cls):
        return
    family = next(base for base in _FAMILIES if isinstance(encoding, base))
    required, optional = _FAMILIES[family]
    # hooks may also be attributes that ``setup`` sets, or methods of an encoding of this package
    set_later = any(name in vars(encoding) for name in HOOKS)
    inherited = any(is_shipped(base) and base not in _FAMILIES for base in cls.__mro__[: cls.__mro__.index(family)])
    check_hook_names(cls, family, required, (*optional, *HOOKS, *OTHER_NAMES), set_later or inherited)
    if cls.position_type not in ("any", "whole", "none"):
        raise_contract_error(cls, None, f"has position_type = {cls.position_type!r}, expected 'any', 'whole' or 'none'")
    if isinstance(encoding, Rotary) and not hasattr(encoding, "rotated"):
        raise_contract_error(cls, "setup", "does not call super().setup(), which prepares the rotation: call it")


def _device(encoding: Encoding) -> torch.device:
    """Return the device of the parameters or buffers, or torch's default device without any."""
    first = next(encoding.parameters(), next(encoding.buffers(), None))
    return torch.get_default_device() if first is None else first.device


class _ContractCheck(HookProbe):
    """The steps of the check, each with its own inputs."""

    def __init__(self, encoding: Encoding, symbols: int, device: torch.device) -> None:
        super().__init__(encoding, symbols, device)
        self.generator = torch.Generator().manual_seed(1)  # any seed: inputs only need to be the same in each process
        double = any(p.dtype == torch.float64 for p in encoding.parameters())
        self.dtypes = WIDE[1:] if double else WIDE  # float64 parameters are not used with float32 positions

    def run(self) -> None:
        """Run all steps; one that the encoding refuses by its own UserError is skipped."""
        for dtype in self.dtypes:
            for near in (True, False):
                self._unless_declined(self._check_family_method, dtype, near)
        for dtype in self.dtypes:
            self._unless_declined(self._check_plain_positions, dtype)
        if self.encoding.position_type != "none":
            self._unless_declined(self._check_uneven_positions)
        self._unless_declined(self._check_gradients)
        self._unless_declined(self._check_decoding)
        self._unless_declined(self._check_reports)

    def _unless_declined(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step until the encoding raises a UserError."""
        with suppress(Declined):
            step(*args)

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Draw normal numbers on the CPU in float64, so that they do not depend on dtype and device."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64, device="cpu").to(self.device, dtype)

    def _inputs(self, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
        """Return random x (B, n, C), and q, k and v (B, H, n, D)."""
        shape = rows, self.heads, self.tokens, self.head
        heads = {name: self._random(*shape, dtype=dtype) for name in ("q", "k", "v")}
        return {"x": self._random(rows, self.tokens, self.width, dtype=dtype), **heads}

    def _positions(self, k: Tensor, queries: int | None = None, rows: int = 1, **kind: Any) -> Positions:
        """Return positions, with token ids if the encoding needs them.

        Args:
            k: (B or 1, m) positions of the tokens.
            queries: number of queries, which are the last tokens; None: all.
            rows: batch size of the token ids.
            kind: ``step`` and ``contiguous`` of :class:`Positions`.
        """
        m, ids = k.shape[1], None
        if self.encoding.needs_token_ids:
            ids = (torch.arange(rows * m, device=self.device) % self.symbols).view(rows, m)
        return Positions(k[:, m - (queries or m) :], k, tokens=ids, **kind)

    def _arange(self, dtype: torch.dtype, m: int | None = None, queries: int | None = None, rows: int = 1) -> Positions:
        """Return positions 0 … m-1, with the arguments of :meth:`_positions`; m is the sample's tokens by default."""
        k = torch.arange(m or self.tokens, device=self.device, dtype=dtype)[None]
        return self._positions(k, queries, rows)

    def _check_family_method(self, dtype: torch.dtype, near: bool) -> None:
        """Check the method that the encoding's family calls.

        Args:
            dtype: dtype of positions or distances.
            near: whether they are 0, 1, 2, …; otherwise the last of them are replaced by large ones.
        """
        encoding, cls = self.encoding, self.cls

        def sample(count: int) -> Tensor:
            """Return ``count`` positions or distances."""
            first = torch.arange(count, device=self.device, dtype=dtype)
            return first if near else torch.cat([first[: -len(FAR_DISTANCES)], first.new_tensor(FAR_DISTANCES)])

        if isinstance(encoding, DistanceBias) and cls.position_bias is DistanceBias.position_bias:
            self.check_log_bias(encoding, sample(self.distances))
            return
        pos = self._positions(sample(self.tokens)[None], step=1.0, contiguous=near)
        if isinstance(encoding, PairwiseBias) and cls.position_bias is PairwiseBias.position_bias:
            self.check_dense_bias("bias", self.call("bias", pos.q, pos.k), pos, (dtype,))
        elif isinstance(encoding, Rotary) and self.overrides(Rotary, "angles"):
            self._check_rotary_methods(encoding, pos, dtype, near)
        elif isinstance(encoding, Absolute) and self.overrides(Absolute, "vectors"):
            self.check_tensor("vectors", self.call("vectors", pos.k), [(1, self.tokens, self.width)], WIDE)

    def _check_rotary_methods(self, encoding: Rotary, pos: Positions, dtype: torch.dtype, near: bool) -> None:
        """Check ``angles`` and ``amplitude``; the arguments are those of :meth:`_check_family_method`."""
        pairs = encoding.rotated // 2
        self.check_tensor("angles", self.call("angles", pos.k, pos), [(1, self.tokens, pairs)], (dtype,))
        widths = (1,) if encoding.scale_whole_head else (1, pairs)
        shapes = [(1, n, width) for n in (1, self.tokens) for width in widths]
        for key in (False, True):
            output = self.call("amplitude", pos.k, pos, key)
            # with a limit of queries, an amplitude is finite only for positions as near as those of one call
            if output is not None and (near or encoding.max_queries_per_call is None):
                self.check_tensor("amplitude", output, shapes, WIDE)

    def _check_plain_positions(self, dtype: torch.dtype) -> None:
        """Check all hooks at plain positions."""
        for _ in self._call_hooks(self._inputs(dtype, 2), self._arange(dtype, rows=2)):
            pass  # the generator checks while it runs

    def _check_uneven_positions(self) -> None:
        """Check all hooks with unevenly spaced positions, fractional ones if the encoding accepts them."""
        dtype, whole = self.dtypes[0], self.encoding.position_type == "whole"
        # distances 1, 2, 3, 1, … between neighbours, or 0.375 times those
        steps = 1.0 + torch.arange(2 * self.tokens, device=self.device, dtype=dtype).view(2, -1) % 3
        k = (steps if whole else steps * 0.375).cumsum(1)
        pos = self._positions(k - k[:, :1], rows=2, step=1.0 if whole else None, contiguous=False)
        for _ in self._call_hooks(self._inputs(dtype, 2), pos):
            pass  # the generator checks while it runs

    def _call_hooks(self, tensors: dict[str, Tensor], pos: Positions) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Call every hook and check what it returns.

        Args:
            tensors: x, q, k and v, as :meth:`_inputs` returns them.
            pos: positions of all tokens.

        Yields:
            The user's method, its output, and the input that a gradient of the output must reach, or None.
        """
        x, q, k, v = (tensors[name] for name in ("x", "q", "k", "v"))
        if self.has("embed"):
            output = self.call("embed", x, pos)
            self.check_tensor("embed", output, [tuple(x.shape)], (x.dtype,))
            yield "embed", output, x
        pos = self.checked_positions(pos)
        features = self.checked_token_features(x) if self.has("token_features") else None
        rotate, query_positions, key_positions = self._rotation(pos)
        if rotate is not None:
            calls = [(q, at, False) for at in query_positions] + [(k, at, True) for at in key_positions]
            for source, at, key in calls:
                yield "rotate", self.checked_rotation(rotate, source, at, pos, key), source
        if self.has("value"):
            output = self.call("value", v, pos)
            self.check_tensor("value", output, [tuple(v.shape)], (v.dtype,))
            yield "value", output, v
        for method, output in self._score_terms(q, k, pos, features):
            reads_queries = method.startswith("transform_scores") or method == "score_product"
            yield self.user_method(method), output, q if reads_queries else None
        if self.has("relative_values") and (values := self.checked_relative_values(pos)) is not None:
            yield "relative_values", values.vectors, None

    def _rotation(self, pos: Positions) -> tuple[Callable[..., Tensor] | None, list[Tensor], list[Tensor]]:
        """Return the function that rotates, or None, and the positions for which it rotates queries and keys."""
        if not (self.has("rotate") or self.has("rotation")):
            return None, [], []
        return self.call("rotation", pos), *self.checked_rotation_positions(pos)

    def _score_terms(
        self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each hook that changes scores with what it adds, or for ``transform_scores`` the attention weights."""
        if self.has("position_bias") and (bias := self.call("position_bias", pos)) is not None:
            yield "position_bias", self._dense_bias("position_bias", bias, pos, 0)
        if self.has("content_bias") and (bias := self.call("content_bias", q, k, pos, features)) is not None:
            yield "content_bias", self._dense_bias("content_bias", bias, pos, len(q))
        if self.has("score_product"):
            yield "score_product", self.checked_products(q, k, pos, features)[0]
        if self.has("transform_scores") and self.encoding.transform_scores is not None:
            yield "transform_scores", self.checked_attention_weights(q, k, pos)
        # one query alone lacks the state that the queries before it leave: see _check_key_state
        has_hook = self.encoding.key_state_width > 0 or self.has("transform_scores_with_state")
        if has_hook and q.shape[2] == k.shape[2]:
            yield "transform_scores_with_state", self.checked_stateful_weights(q, k, pos)[0]

    def _dense_bias(self, method: str, bias: Any, pos: Positions, rows: int) -> Tensor:
        """Return the values (B or 1, H, n, m) of a bias that a hook returned."""
        method = self.user_method(method)
        self.check_bias_type(method, bias, pos, rows)
        output: Tensor = self.call(method, pos, function=bias.materialize)
        self.check_dense_bias(method, output, pos, WIDE, rows)
        return output

    def _check_gradients(self) -> None:
        """Check that a finite gradient reaches the input of each hook, and all parameters."""
        dtype, trained = self.dtypes[0], set[str]()
        tensors = {name: x.requires_grad_() for name, x in self._inputs(dtype, 2).items()}
        learned = {name: p for name, p in self.encoding.named_parameters() if p.requires_grad}
        for method, output, source in self._call_hooks(tensors, self._arange(dtype, rows=2)):
            trained |= self._check_output_gradients(method, output, source, learned)
        missing = [f"'{name}'" for name in learned if name not in trained]
        if missing:
            text = f"has parameters that get no gradient ({', '.join(missing)}): its hooks detach or do not use them"
            if isinstance(self.encoding, Rotary) and self.cls.rotate is Rotary.rotate:
                text += "; Rotary.rotate computes angles without gradients, so learned angles need their own rotate"
            raise_contract_error(self.cls, None, text)

    def _check_output_gradients(
        self, method: str, output: Tensor, source: Tensor | None, learned: Mapping[str, Tensor]
    ) -> set[str]:
        """Check that the gradients of a hook's output are finite, and that one reaches its input.

        Args:
            method: name of the hook.
            output: tensor that the hook returned, or that was computed from its result.
            source: the input that it should depend on, or None.
            learned: parameters of the encoding by name.

        Returns:
            The names of the parameters that a gradient reaches.
        """
        weights = self._random(*output.shape, dtype=output.dtype)
        # hidden keys have no gradient in attention
        loss = (output.masked_fill(output.isneginf(), 0.0) * weights).sum()
        inputs = {"its input": source} if source is not None else {}
        targets = {**inputs, **{f"its parameter '{name}'": p for name, p in learned.items()}}
        grads: tuple[Tensor | None, ...] = ()
        if loss.requires_grad and targets:
            # the graph is retained, since hooks may share one
            grads = torch.autograd.grad(loss, [*targets.values()], allow_unused=True, retain_graph=True)
        for name, grad in zip(targets, grads, strict=False):
            if grad is not None and not bool(torch.isfinite(grad).all()):
                self.refuse(method, f"has the gradient {first_nonfinite(grad)} for {name}, expected a finite one")
        if source is not None and (not grads or grads[0] is None):
            self.refuse(method, "passes no gradient to its input: do not detach it")
        parameter_grads = grads[len(inputs) :]
        return {name for name, grad in zip(learned, parameter_grads, strict=False) if grad is not None}

    @torch.no_grad()
    def _check_decoding(self) -> None:
        """Check that one query of the first tokens, as in decoding, gives the same as a pass over all n tokens."""
        n, tensors = self.tokens, self._inputs(torch.float64, 1)
        full = [
            (method, output)
            for method, output in self._outputs(tensors, self._arange(torch.float64), 0)
            if method != "transform_scores_with_state"
        ]
        if not self.encoding.length_dependent:  # otherwise earlier tokens may change with later ones
            self._compare_query(full, tensors, n // 2)
        self._compare_query(full, tensors, n - 1)
        self._check_cached(tensors["k"])
        if self.encoding.key_state_width > 0:
            self._check_key_state(tensors["q"], tensors["k"])
        if self.encoding.transforms_keys:
            self._check_transformed_keys(tensors)

    def _check_key_state(self, q: Tensor, k: Tensor) -> None:
        """Check that two blocks of queries, the second with the state after the first, equal all n queries at once."""
        n, first, name = self.tokens, self.tokens // 2, "transform_scores_with_state"
        pos, begin = (self.checked_positions(self._arange(torch.float64, m)) for m in (n, first))
        rest = self.checked_positions(self._arange(torch.float64, n, queries=n - first))
        expected = self.checked_stateful_weights(q, k, pos)
        _, state = self.checked_stateful_weights(q[:, :, :first], k[:, :, :first], begin)
        weights, state = self.checked_stateful_weights(q[:, :, first:], k, rest, state)
        label, remedy = "two blocks of queries", "the state may depend on the queries alone, not on their blocks"
        self._compare(name, expected[0][:, :, first:], weights, label=label, other="one block", remedy=remedy)
        self._compare(name, expected[1], state, label=label, other="one block", remedy=remedy)

    def _check_transformed_keys(self, tensors: dict[str, Tensor]) -> None:
        """Check that queries after the keys that earlier tokens have transformed equal those of all n tokens."""
        n, first, name, q, k = self.tokens, self.tokens // 2, "score_product", tensors["q"], tensors["k"]
        pos, begin = (self.checked_positions(self._arange(torch.float64, m)) for m in (n, first))
        rest = self.checked_positions(self._arange(torch.float64, n, queries=n - first))
        features = self.checked_token_features(tensors["x"]) if self.has("token_features") else None
        first_features = None if features is None else features[:, :, :first]
        expected = self.checked_products(q, k, pos, features)[0]
        _, state = self.checked_products(q[:, :, :first], k[:, :, :first], begin, first_features)
        output, _ = self.checked_products(q[:, :, first:], k, rest, features, state)
        label, remedy = "queries after transformed keys", "let key_state return the keys as all tokens transform them"
        self._compare(name, expected[:, :, first:], output, label=label, other="one pass", remedy=remedy)

    def _compare_query(self, full: list[tuple[str, Tensor]], tensors: dict[str, Tensor], last: int) -> None:
        """Compare one query, token ``last``, with its row in a pass over all tokens.

        Args:
            full: outputs of the hooks for all tokens, as :meth:`_outputs` returns them.
            tensors: x, q, k and v of all tokens.
            last: index of the token.
        """
        n, m = self.tokens, last + 1
        first_tokens = {name: x[..., :m, :] for name, x in tensors.items()}
        decoded = self._outputs(first_tokens, self._arange(torch.float64, m, queries=1), last)
        if [method for method, _ in decoded] != [method for method, _ in full]:
            raise_contract_error(
                self.cls, None, f"has other hooks for {m} tokens than for {n}: let a hook always return a bias"
            )
        for (method, output), (_, step_output) in zip(full, decoded, strict=True):
            expected = _first_tokens(method, output, last)
            if method in ("position_bias", "content_bias"):
                # softmax does not change if a number is added to all keys of a query
                expected, step_output = (x - x[..., -1:] for x in (expected, step_output))
            label, other = f"one query of {m} tokens, as in decoding,", f"all {n} tokens"
            self._compare(self.user_method(method), expected, step_output, label=label, other=other)

    def _outputs(self, tensors: dict[str, Tensor], pos: Positions, first: int) -> list[tuple[str, Tensor]]:
        """Return what attention receives from each hook, by name.

        Args:
            tensors: x, q, k and v of all tokens, as :meth:`_inputs` returns them.
            pos: positions of the tokens, of which the last ones are queries.
            first: index of the first query.
        """
        x, q, k, v = tensors["x"], tensors["q"][:, :, first:], tensors["k"], tensors["v"]
        outputs: list[tuple[str, Tensor]] = []
        if self.has("embed"):
            outputs.append(("embed", self.call("embed", x[:, first:], pos)))
        pos = self.checked_positions(pos)
        features = self.checked_token_features(x) if self.has("token_features") else None
        if features is not None and (last_features := self.checked_token_features(x[:, first:])) is not None:
            outputs.append(("token_features", last_features))
        rotate, query_positions, key_positions = self._rotation(pos)
        if rotate is not None:
            queries = [self.call("rotate", q, at, pos, function=rotate) for at in query_positions]
            keys = [self.call("rotate", k, at, pos, function=rotate, key=True) for at in key_positions]
            # only products matter: an encoding may move a factor from queries to keys, as xPos does
            outputs += [("rotate", torch.matmul(a, b.mT)) for a, b in zip(queries, keys, strict=True)]
            q, k = (queries[0], keys[0]) if len(queries) == 1 else (q, k)
        if self.has("value"):
            outputs.append(("value", self.call("value", v, pos)))
        outputs += self._score_terms(q, k, pos, features)
        if self.has("relative_values") and (values := self.checked_relative_values(pos)) is not None:
            vectors = values.vectors[:, table_index(values, pos.q, pos.k)[0]]  # (H or 1, n, m, D)
            outputs.append(("relative_values", vectors.sum(-1)))
        return outputs

    def _check_cached(self, k: Tensor) -> None:
        """Check that rotated keys and tables of distances, which decoding caches, do not change with more tokens."""
        n, dtype = self.tokens, torch.float64
        if self.encoding.rotates and self.encoding.fixed_rotation:
            rotated_keys = []
            for m in (n // 2, n):
                pos = self.checked_positions(self._arange(dtype, m))
                rotated_keys.append(self.call("rotate", k[:, :, :m], pos.k, pos, key=True)[:, :, : n // 2])
            early, late = rotated_keys
            label, remedy = f"keys of {n // 2} tokens", "set fixed_rotation = False"
            self._compare("rotate", late, early, label=label, other=f"{n}", remedy=remedy)
        if self.encoding.is_distance_bias:
            short, long = (
                self.call("position_bias", self._arange(dtype, m, queries=1)).table[:, :n] for m in (n, 2 * n)
            )
            name, remedy = self.user_method("position_bias"), "set length_dependent = True"
            self._compare(name, long, short, label=f"{n} distances", other=f"{2 * n}", remedy=remedy)

    def _compare(
        self, method: str, expected: Tensor, output: Tensor, *, label: str, other: str, remedy: str = ""
    ) -> None:
        """Refuse outputs that differ by more than rounding.

        Args:
            method: name of the user's method.
            expected: its output for the inputs that ``other`` describes.
            output: its output for the inputs that ``label`` describes; broadcasts with ``expected``.
            label: description for the message.
            other: description for the message.
            remedy: what the user can do; by default the remedy for a hook that depends on later tokens.
        """
        remedy = remedy or "let it read earlier tokens alone, or set length_dependent = True"
        a, b = torch.broadcast_tensors(expected, output)
        a_hidden, b_hidden = a.isneginf(), b.isneginf()
        if not torch.equal(a_hidden, b_hidden):
            self.refuse(method, f"gives {label} other values than {other} (-inf in one of them): {remedy}")
        a, b = a.masked_fill(a_hidden, 0.0), b.masked_fill(b_hidden, 0.0)
        scale = max(1.0, float(a.abs().max()))
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-5 * scale):
            gap = f"up to {float((a - b).abs().max()):.2g} apart"
            self.refuse(method, f"gives {label} other values than {other} ({gap}): {remedy}")

    def _check_reports(self) -> None:
        """Check what commands show of an encoding: learned quantities, and the formula of each head."""
        scalars = self.call("logged_scalars")
        if not isinstance(scalars, dict):
            self.refuse_value("logged_scalars", scalars, "a dict of tensors")
        for value in scalars.values():
            self.check_tensor("logged_scalars", value, [(self.heads,), ()], (*WIDE, torch.int64), finite=False)
        if not self.overrides(Encoding, "log_bias_formulas") or (formulas := self.call("log_bias_formulas")) is None:
            return
        if not isinstance(formulas, list) or not all(isinstance(formula, str | LogBias) for formula in formulas):
            self.refuse_value("log_bias_formulas", formulas, f"a list of {self.heads} formulas or None")
        if len(formulas) != self.heads:
            self.refuse(
                "log_bias_formulas", f"returned {len(formulas)} formulas, expected {self.heads}, one for each head"
            )


def _first_tokens(method: str, output: Tensor, last: int) -> Tensor:
    """Return the part of a hook's output for all tokens that one query, token ``last``, and the keys up to it have."""
    if method in _SQUARE:
        return output[..., last : last + 1, : last + 1]
    return output[..., last : last + 1, :] if method in _BY_QUERY else output[..., : last + 1, :]
