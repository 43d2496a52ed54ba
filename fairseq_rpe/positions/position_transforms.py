"""The two position slots of a model: which transform moves its tokens in training and in evaluation."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.positions import Transform, build, freeze_rows, names
from fairseq_rpe.positions.shift import Identity


class Moves:
    """Applies the training or the evaluation transform, once per forward pass.

    Random transforms draw from a generator of their own, seeded from (seed, update, batch within the update, rank):
    data order and dropout do not change, a resumed run draws what the uninterrupted one drew, and every data-parallel
    rank draws its own. In evaluation each row has a draw of its own, seeded from (seed, ``draw``, the row's tokens): a
    checkpoint's perplexity is repeatable and no matter of batches, and another ``draw`` is an independent one.

    ``train`` and ``evaluation`` are specs; an empty one for evaluation: what the transform of training names, mostly
    ``identity``. ``train_length`` is in tokens.
    """

    draw = 0

    def __init__(self, train: str, evaluation: str, train_length: int | None, seed: int, rank: int) -> None:
        self.train = build(train, train_length)
        self.evaluation = build(evaluation or self.train.evaluation, train_length)
        self.seed, self.rank = seed, rank
        self.update, self.batch = -1, 0

    def set_num_updates(self, update: int) -> None:
        """fairseq says so before every training batch, and once more when it resumes."""
        if update != self.update:
            self.update, self.batch = update, 0

    def active(self, training: bool) -> Transform | None:
        """The transform in force, or None where positions stay plain."""
        transform = self.train if training else self.evaluation
        return None if isinstance(transform, Identity) else transform

    def length_invariant(self, training: bool) -> bool:
        """Whether tokens stay where they are while their row gets longer."""
        transform = self.active(training)
        return transform is None or transform.length_invariant

    def __call__(
        self, plain: Positions, lengths: Tensor, training: bool, decoding: bool, rows: Sequence[Tensor] = ()
    ) -> Positions:
        """Moved positions of the same tokens; lengths (B,) int64 are the real tokens of each row.

        ``rows``: the ids of each row's real tokens, by which random positions are drawn in evaluation. Without them
        all rows share one draw.

        Raises UserError: random positions while decoding with a cache, which would move the tokens already in it.
        """
        transform = self.active(training)
        if transform is None:
            return plain
        if decoding and transform.random:
            raise UserError(
                "random positions would move at every step of decoding: name another --positions-eval "
                f"(of {', '.join(names())})"
            )
        generator = None
        if transform.random and rows and not training:
            own = [generator_of(self.seed, "evaluation", self.draw, ids.tolist()) for ids in rows]
            transform = freeze_rows(transform, lengths.tolist(), own)
        elif transform.random:
            generator = generator_of(
                *((self.seed, self.update, self.batch, self.rank) if training else (self.seed, "evaluation"))
            )
        self.batch += training
        moved = transform(plain.k, lengths, generator)
        first = plain.k.shape[1] - plain.q.shape[1]
        even = moved.contiguous and plain.contiguous
        return Positions(moved.k[:, first:], moved.k, moved.step, even, plain.tokens)


def check_moves(moves: Moves, encoding: Encoding, spec: str) -> None:
    """Check that an encoding can follow the position transforms of a model.

    Args:
        moves: the transforms of training and evaluation.
        encoding: of the model, built from ``spec``.
        spec: the encoding's name and options, for the message.

    Raises:
        UserError: the encoding reads no positions, or whole ones only where a transform makes fractions.
    """
    for flag, transform in (("--positions-train", moves.active(True)), ("--positions-eval", moves.active(False))):
        if transform is not None and encoding.position_type == "none":
            raise UserError(f"{flag}: '{spec}' reads no positions, so moving them does nothing: drop the flag")
        if transform is not None and transform.fractional and encoding.position_type == "whole":
            raise UserError(f"{flag}: '{spec}' accepts whole positions only and this transform makes fractions")


def generator_of(*what: object) -> torch.Generator:
    """A generator on the CPU whose seed follows from ``what``, by what it looks like in print."""
    seed = int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "big") >> 1
    return torch.Generator().manual_seed(seed)
