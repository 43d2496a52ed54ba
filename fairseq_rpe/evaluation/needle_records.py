"""Record of the attention to the needle of one example, and its tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fairseq_rpe.utils.records import Count, Natural, Share, TextTuple
from fairseq_rpe.utils.table import csv_text

_DIGITS = 6  # decimals of an attention weight in a record


@dataclass(frozen=True, kw_only=True)
class HeadAttention:
    """Attention from the words of an answer to the needle, in every head, on one example of a needle task.

    The *queries* are the tokens at which the model predicts the words of the right answer: the last token of the prompt
    and all words of the answer but the last. The model reads the right answer whatever it would generate. All values
    are means over the queries. Layers and heads are counted from 0 here.

    Attributes:
        needles: index of the first word of each run of words that states the answer, and the index after its last.
        queries: number of queries, which are the last tokens that the model reads.
        mass: attention that the needle has, by layer and head; at most 1.
        total: attention that all tokens have together, by layer and head: 1, or less if a layer has a null logit, which
            is a further key without a token.
        layer: layer of the head with the largest ``mass``, the first of equals.
        head: that head.
        weights: attention of that head to each token that the model reads.
        layer_specs: encoding of each layer if they differ, else empty.
    """

    needles: tuple[tuple[Natural, ...], ...]
    queries: Count
    mass: tuple[tuple[float, ...], ...]
    total: tuple[tuple[float, ...], ...]
    layer: Natural
    head: Natural
    weights: tuple[float, ...]
    layer_specs: TextTuple = ()

    @property
    def is_needle(self) -> np.ndarray:
        """(tokens,) bool: whether each token belongs to a needle."""
        inside = np.zeros(len(self.weights), bool)
        for start, end in self.needles:
            inside[start:end] = True
        return inside

    @property
    def even_mass(self) -> float:
        """Attention that the needle would have if each query attended evenly to itself and all tokens before it."""
        keys = len(self.weights) - self.queries + 1 + np.arange(self.queries)  # tokens that each query sees
        return float((self.is_needle.sum() / keys).mean())

    def fault(self) -> str | None:
        """Return the contradiction in these values as the end of a sentence, or None if there is none.

        :mod:`fairseq_rpe.utils.records` calls it when it reads a record.
        """
        if any(len(span) != 2 or not span[0] < span[1] <= len(self.weights) for span in self.needles):
            return "has needles that are not spans of its tokens"
        if self.queries > len(self.weights):
            return "has more queries than tokens"
        shapes = {(len(rows), *map(len, rows)) for rows in (self.mass, self.total)}
        if len(shapes) > 1 or not (self.layer < len(self.mass) and self.head < len(self.mass[self.layer])):
            return "has mass and total of different layers or heads"
        return None


@dataclass(frozen=True, kw_only=True)
class NeedleAttention(HeadAttention):
    """Attention to the needle of one example, with the example and the model.

    Attributes:
        checkpoint: digest of the checkpoint.
        encoding: encoding that the model was trained with.
        algorithm: spec of the task.
        split: split of the example.
        rpe: encoding in place of the checkpoint's.
        positions: position transform in place of the checkpoint's.
        transform: spec of the position transform that was used.
        length: number of tokens of prompt and answer.
        depth: relative position of the needle.
        example: number of the example among those of its length and depth, from 0.
        tokens: words that the model reads: the prompt and all words of the answer but the last.
        answer: words of the right answer.
        prediction: words that the model generates greedily after the prompt, with ``</s>`` if it generates it.
    """

    checkpoint: str
    encoding: str
    algorithm: str
    split: str
    rpe: str | None = None
    positions: str | None = None
    transform: str
    length: Natural
    depth: Share
    example: Natural
    tokens: TextTuple
    answer: TextTuple
    prediction: TextTuple

    @property
    def is_right(self) -> bool:
        """Whether the model generates the right answer and its end."""
        return self.prediction == (*self.answer, "</s>")


def middle_depth(depths: Sequence[float]) -> float:
    """Return the depth that is the closest to 0.5, the first of equals; raise ValueError if there are none."""
    return min(depths, key=lambda depth: abs(depth - 0.5))


def round_weights(values: np.ndarray) -> tuple[float, ...]:
    """Return attention weights (n,) for a record, rounded to six decimals."""
    return tuple(np.round(values.astype(np.float64), _DIGITS).tolist())


def mass_csv(result: HeadAttention) -> str:
    """Return a CSV row for each layer (from 0) and head (from 1, as in TensorBoard): attention to needle and tokens."""

    def rows() -> Iterator[tuple[object, ...]]:
        for layer, (masses, totals) in enumerate(zip(result.mass, result.total, strict=True)):
            for head, (mass, total) in enumerate(zip(masses, totals, strict=True), start=1):
                yield layer, head, mass, total, result.even_mass

    return csv_text(("layer", "head", "needle_mass", "total_mass", "even_mass"), rows())


def weights_csv(result: NeedleAttention) -> str:
    """Return a CSV row for each token: its attention from the head with the largest attention to the needle."""
    inside = result.is_needle
    rows = ((i, token, int(inside[i]), result.weights[i]) for i, token in enumerate(result.tokens))
    return csv_text(("index", "token", "in_needle", "weight"), rows)
