"""Answers to questions as records: what is asked of which checkpoint, and how right the answers were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.evaluation.records import Overrides, Result, draws_of
from fairseq_rpe.evaluation.score_by_distance import Band
from fairseq_rpe.questions import dataset, length_check, metrics
from fairseq_rpe.questions.prompt import Cut
from fairseq_rpe.utils import files
from fairseq_rpe.utils.records import Count, Natural, Words, filled

# A score is divided by the tokens of an answer to this power, which must stay a number.
MOST_PENALTY = 10.0
By = Literal["generation", "likelihood"]


@dataclass(frozen=True, kw_only=True)
class QuestionKey:
    """What answers are of: those of a ``set``'s ``subset``, from at most ``length`` tokens, read and written.

    ``by``: written freely, or the likeliest choice; ``beam``: its width, 1 is greedy, and ``length_penalty``, which
    only a wider one has; ``cut``: where a document is shortened. ``draws``: of random ``positions`` for each question;
    interpolation without a ratio has one for each length, trained tokens / ``length``.
    """

    checkpoint: str
    data: str
    set: str
    subset: str
    by: By = "generation"
    beam: Count = 1
    length_penalty: float | None = None
    cut: Cut = "end"
    rpe: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    draws: Count | None = None
    length: Count


@dataclass(frozen=True, kw_only=True)
class QuestionRequest(Overrides):
    """Answers of a checkpoint to prepared questions at several context lengths: the options of ``fairseq-rpe answer``.

    ``sets``: None: all of the folder; ``out``: where unfinished answers are kept as well; ``predictions``: a folder
    for the answers themselves.
    """

    checkpoint: Path
    data: Path
    lengths: Sequence[int]
    sets: Sequence[str] | None = None
    subset: str = "valid"
    by: By = "generation"
    beam: int = 1
    length_penalty: float | None = None
    cut: Cut = "end"
    out: Path | None = None
    predictions: Path | None = None
    log: Path | None = None

    def keys(self) -> list[QuestionKey]:
        """A measurement for each set and length.

        Raises UserError: the checkpoint cannot be used, or what :meth:`keys_of` says.
        """
        checkpoint_file.check(self.checkpoint)
        return self.keys_of(files.file_digest(self.checkpoint))

    def keys_of(self, checkpoint: str) -> list[QuestionKey]:
        """The same for a checkpoint of which the digest is known.

        Raises UserError: the data, a set or a length cannot be used, a question has no room or no choices to compare,
        or answers cannot be scored.
        """
        folder = dataset.load(self.data)
        known = folder.sets
        if len(set(self.sets or ())) < len(self.sets or ()):
            raise UserError(f"--sets {','.join(self.sets or ())} names a set twice: leave one out")
        for name in self.sets or ():
            if name not in known:
                raise UserError(f"--sets {name}: {self.data} has {', '.join(known)}{nearest(name, known)}")
        sets = tuple(self.sets or known)
        for name in sets:
            info = known[name]
            if self.subset not in info.splits:
                have = ", ".join(info.splits)
                raise UserError(
                    f"--subset {self.subset}: {name} has no answers there, but in {have}: name one of these"
                )
            metrics.check(*info.metrics, info.published)
        if self.by == "likelihood" and self.beam > 1:
            raise UserError("--beam is of --by generation: drop it, choices are all compared")
        if self.length_penalty is not None and self.beam == 1:
            raise UserError("--length-penalty is of a beam: give --beam K above 1, or drop it")
        if self.length_penalty is not None and not 0 <= self.length_penalty <= MOST_PENALTY:
            raise UserError(f"--length-penalty {self.length_penalty:g} is out of range: use 0 to {MOST_PENALTY:g}")
        length_check.check(folder, self.subset, self.lengths, sets, compared=self.by == "likelihood")
        of = {"checkpoint": checkpoint, "data": dataset.digest(self.data)}
        penalty = 1.0 if self.beam > 1 and self.length_penalty is None else self.length_penalty
        own = {**of, "length_penalty": penalty, "draws": draws_of(self.positions)}
        return [filled(QuestionKey, self, **own, set=name, length=n) for name in sets for n in self.lengths]


@dataclass(frozen=True, kw_only=True)
class QuestionResult(QuestionKey, Result):
    """How right the answers to all ``questions`` were: ``metrics`` in percent, of which ``published`` names one.

    ``cut_documents``: questions whose document was shortened, by ``lost_tokens`` in all; ``empty``: answers of nothing
    but white space; ``undefined``: metrics that these answers leave undefined, which are 0; ``transform``: of
    positions. ``distances``: the same score by how far back the answer stands, where that is on record. ``seconds`` of
    writing, without loading.
    """

    of = QuestionKey
    suite: str
    questions: Count
    metrics: Mapping[str, float] = field(hash=False)
    published: str
    score: float
    cut_documents: Natural
    lost_tokens: Natural
    empty: Natural
    undefined: Words = ()
    transform: str
    distances: tuple[Band, ...] = ()
    seconds: float | None = None
