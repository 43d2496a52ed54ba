"""The position transforms of a model, one for training and one for evaluation."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.positions import Transform, build, freeze_rows, names
from fairseq_rpe.positions.shift import Identity


class PositionTransforms:
    """Applies the training or the evaluation transform, once per forward pass.

    Random transforms draw from separate generators. In training the seed is (seed, update, batch within the update,
    rank): data order and dropout are not affected, a resumed run draws the same positions as an uninterrupted one, and
    data-parallel ranks draw different ones. In evaluation each row has its own draw, seeded by (seed, ``sample``, the
    row's tokens): perplexity is reproducible and independent of batching; another ``sample`` is an independent draw.

    Args:
        train: spec of the transform of training.
        evaluation: spec of the transform of evaluation; empty for the default of the training transform, mostly
            ``identity``.
        train_length: training length in tokens, or None if unknown.
        seed: seed of random positions.
        rank: rank of this process in data-parallel training.

    Attributes:
        sample: index of the draw in evaluation.
        update: number of updates so far; -1 before fairseq sets it.
        batch: number of training batches since the last update.
    """

    sample = 0

    def __init__(self, train: str, evaluation: str, train_length: int | None, seed: int, rank: int) -> None:
        self.train = build(train, train_length)
        self.evaluation = build(evaluation or self.train.evaluation, train_length)
        self.seed, self.rank = seed, rank
        self.update, self.batch = -1, 0

    def set_num_updates(self, update: int) -> None:
        """Set the number of the update; fairseq calls this before every training batch and when it resumes."""
        if update != self.update:
            self.update, self.batch = update, 0

    def active(self, training: bool) -> Transform | None:
        """Return the transform of training or evaluation, or None if that is ``identity``."""
        transform = self.train if training else self.evaluation
        return None if isinstance(transform, Identity) else transform

    def length_invariant(self, training: bool) -> bool:
        """Return whether tokens keep their positions when their row gets longer."""
        transform = self.active(training)
        return transform is None or transform.length_invariant

    def __call__(
        self, plain: Positions, lengths: Tensor, training: bool, decoding: bool, rows: Sequence[Tensor] = ()
    ) -> Positions:
        """Return the transformed positions of the same tokens.

        Args:
            plain: positions 0, 1, 2 … of each row.
            lengths: (B,) int64 number of real tokens of each row.
            training: use the transform of training.
            decoding: a KV cache is in use.
            rows: ids of each row's real tokens, which seed random positions in evaluation; without them all rows share
                one draw.

        Raises:
            UserError: positions are random while decoding with a KV cache, whose keys have other positions.
        """
        transform = self.active(training)
        if transform is None:
            return plain
        if decoding and transform.random:
            raise UserError(
                "random positions would change at every decoding step: use another --positions-eval "
                f"(of {', '.join(names())})"
            )
        generator = None
        if transform.random:
            if training:
                generator = seeded_generator(self.seed, self.update, self.batch, self.rank)
            elif rows:
                generators = [seeded_generator(self.seed, "evaluation", self.sample, ids.tolist()) for ids in rows]
                transform = freeze_rows(transform, lengths.tolist(), generators)
            else:
                generator = seeded_generator(self.seed, "evaluation")
        if training:
            self.batch += 1
        transformed = transform(plain.k, lengths, generator)
        first = plain.k.shape[1] - plain.q.shape[1]
        contiguous = transformed.contiguous and plain.contiguous
        return Positions(transformed.k[:, first:], transformed.k, transformed.step, contiguous, plain.tokens)


def check_transforms(transforms: PositionTransforms, encodings: LayerEncodings) -> None:
    """Check that the encodings of a model can follow its position transforms.

    Args:
        transforms: transforms of a model, one for training and one for evaluation, either of which may be missing.
        encodings: encodings of the model.

    Raises:
        UserError: an encoding accepts only whole positions and a transform makes fractions; no encoding reads
            positions; or some encodings of a pattern of layers read tokens.
    """
    for flag, transform in (
        ("--positions-train", transforms.active(True)),
        ("--positions-eval", transforms.active(False)),
    ):
        if transform is None:
            continue
        if all(encoding.position_type == "none" for encoding in encodings):
            specs = " and ".join(f"'{spec}'" for spec in dict.fromkeys(encodings.specs))
            reads = "read" if encodings.is_mixed else "reads"
            raise UserError(f"{flag}: {specs} {reads} no positions, so a transform has no effect: drop the flag")
        for encoding, spec in zip(encodings, encodings.specs, strict=True):
            if transform.fractional and encoding.position_type == "whole":
                raise UserError(f"{flag}: '{spec}' accepts whole positions only and this transform makes fractions")
            if encodings.is_mixed and encoding.needs_token_ids:
                raise UserError(
                    f"{flag}: '{spec}' reads tokens, and other layers follow the transform: drop the flag, or use "
                    "encodings that read positions"
                )


def seeded_generator(*values: object) -> torch.Generator:
    """Return a generator on the CPU that is seeded by a hash of the ``repr`` of ``values``."""
    seed = int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1
    return torch.Generator().manual_seed(seed)
