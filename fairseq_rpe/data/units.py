"""Loss in units that do not depend on the tokenizer: bits per byte and perplexity per word."""

from dataclasses import dataclass, fields
from pathlib import Path

from fairseq_rpe.data.folder import read_manifest


@dataclass(frozen=True)
class Units:
    """What a split of a corpus consists of.

    Attributes:
        tokens: of the tokenizer, with line ends and document boundaries.
        bytes: of its text in UTF-8, line ends included.
        words: separated by white space, and each line end is one more, as in the published perplexities
            of WikiText-103 (245,569 for its test text).
        documents: how many there are.
    """

    tokens: int
    bytes: int
    words: int
    documents: int

    def bits_per_byte(self, loss_base2: float) -> float:
        """Bits for each byte of text, from the mean loss in bits over all tokens.

        >>> Units(tokens=250, bytes=1000, words=200, documents=1).bits_per_byte(4.0)
        1.0
        """
        return loss_base2 * self.tokens / self.bytes

    def word_ppl(self, loss_base2: float) -> float:
        """Perplexity per word, from the mean loss in bits over all tokens.

        >>> Units(tokens=250, bytes=1000, words=200, documents=1).word_ppl(4.0)
        32.0
        """
        exponent = loss_base2 * self.tokens / self.words
        return 2.0**exponent if exponent < 1024 else float("inf")


def read_units(folder: Path, subset: str) -> Units | None:
    """The units of a split of a prepared corpus, ``None`` if they were not recorded when it was prepared."""
    split = read_manifest(folder).get("splits", {}).get(subset, {})
    counts = {field.name: split.get(field.name) for field in fields(Units)}
    return Units(**counts) if all(isinstance(count, int) and count > 0 for count in counts.values()) else None
