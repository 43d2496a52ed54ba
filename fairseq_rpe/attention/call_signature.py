"""What calls of attention have in common that one backend may serve best: the kind of a call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.attention.plan import Plan, evenly_spaced
from fairseq_rpe.core.bias import Bias, DenseBias, PairBias, PointwiseBias, ScaledDistanceBias, ToeplitzBias

LEAST_KEYS = 128  # of the classes of lengths, each four times as long as the one before


@dataclass(frozen=True)
class Kind:
    """All that decides which backends take a call and, but for the batch, how long they take. Reads no tensor's values.

    Attributes:
        dtype: of q, k and v; several only where they differ.
        width: of a head.
        form: none, table, curve, pointwise, pair or dense.
        learned: the bias may need a gradient.
        spacing: even, where indices say a pair's distance; steps, where distances are multiples of one; or any.
        padded: some keys are hidden.
        queries: all tokens, one, or some.
        keys: at most so many.
        training: gradients are wanted.
        dropout: of weights.
        pruned: what provably does not matter may be left out.
        deterministic: torch was asked for deterministic algorithms.
        rounded: products of float32 matrices may be rounded to TF32.
        documents: several of them share a row, and queries see their own.
    """

    dtype: str
    width: int
    form: str
    learned: bool
    spacing: str
    padded: bool
    queries: str
    keys: int
    training: bool
    dropout: bool
    pruned: bool
    deterministic: bool
    rounded: bool
    documents: bool = False

    def __str__(self) -> str:
        """In words, different ones for different kinds."""
        flags = ("learned", "padded", "training", "dropout", "pruned", "deterministic", "rounded", "documents")
        words = [self.dtype, f"head width {self.width}", f"bias: {self.form}", f"spacing: {self.spacing}"]
        words += [f"queries: {self.queries}", f"up to {self.keys} keys"]
        return ", ".join([*words, *(flag for flag in flags if getattr(self, flag))])


def kind_of(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Kind:
    """The kind of the call ``backend(q, k, v, plan, dropout)``."""
    n, m, form, pos = q.shape[2], k.shape[2], plan.form, plan.positions
    grads = torch.is_grad_enabled()
    learned = grads and _learned(form)
    even = evenly_spaced(form, pos) if isinstance(form, ToeplitzBias) else pos.contiguous and pos.step is not None
    keys = LEAST_KEYS
    while keys < m:
        keys *= 4
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, k, v)]
    return Kind(
        dtype=dtypes[0] if len({*dtypes}) == 1 else "/".join(dtypes),
        width=q.shape[3],
        form=_name(form),
        learned=learned,
        spacing="even" if even else "any" if pos.step is None else "steps",
        padded=plan.padding is not None,
        queries="all" if n == m else "one" if n == 1 else "some",
        keys=keys,
        training=grads and (learned or any(x.requires_grad for x in (q, k, v))),
        dropout=dropout > 0,
        pruned=plan.prune > 0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        rounded=q.dtype == torch.float32 and _rounds(),
        documents=plan.last_query is not None,
    )


def _name(form: Bias | None) -> str:
    kinds = {
        ToeplitzBias: "table",
        ScaledDistanceBias: "curve",
        PointwiseBias: "pointwise",
        PairBias: "pair",
        DenseBias: "dense",
    }
    return next((name for kind, name in kinds.items() if isinstance(form, kind)), "none")


def _learned(form: Bias | None) -> bool:
    """What a function reads is not known, so it may be learned."""
    if isinstance(form, PointwiseBias):
        return any(x.requires_grad for x in form.numbers)
    if form is None or isinstance(form, PairBias):
        return form is not None
    return (form.table if isinstance(form, ToeplitzBias) else form.bias).requires_grad


def _rounds() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # torch was told by its newer settings, which the older ones cannot express
        return True
