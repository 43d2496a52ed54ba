"""A prepared folder of gaps: the questions of all documents, as many of them from each distance, chosen by a seed."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import Document
from fairseq_rpe.data.encoders import UNK, Encoder, load_encoder
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.sourcefiles import Entry
from fairseq_rpe.data.splits import DividedDocuments
from fairseq_rpe.data.vocabulary import given_vocabulary
from fairseq_rpe.questions.cloze import ANSWER_TOKENS, BINS, FORMS, SENTENCES, WHERE, Gap, quotas
from fairseq_rpe.questions.dataset import Prepared
from fairseq_rpe.questions.dataset_writer import Asked, AskedSet, check_dest, store
from fairseq_rpe.questions.heldout_documents import Division, HeldOut
from fairseq_rpe.questions.name_permutation import Exchange
from fairseq_rpe.questions.needle import FREQUENT, Places, plant
from fairseq_rpe.questions.question import Question
from fairseq_rpe.questions.text_hash import chance_of
from fairseq_rpe.utils.progress import Progress

_LEAST_TOKENS = 128
ASKED = (*SENTENCES, "planted")  # sentences
NAMES = ("own", "exchanged")  # of the text; or drawn for each question from those of the training texts
_TITLES = {"gap": "which name fills the gap", "completion": "which name comes next"}
MADE_BY = "fairseq-rpe prepare-gaps"


@dataclass(frozen=True)
class GapOptions:
    """Which questions to make, out of which text, and where."""

    dest: Path
    vocab_from: Path  # a prepared corpus whose tokenizer is taken
    train: tuple[Path | Entry, ...]  # all text if the others are empty: it is divided by document then
    tokens: int  # of a context that a passage, its question and room for the answer fill
    valid: tuple[Path | Entry, ...] = ()
    test: tuple[Path | Entry, ...] = ()
    documents: int | None = None  # of training, the first ones; None takes all
    text_field: str = "text"
    questions: int = 4000  # of training
    valid_questions: int = 400  # of validation, and as many of the test
    valid_tokens: int | None = None  # of their contexts; None: as in training
    shortest: int | None = None  # passage of training, in tokens; None: all fill their contexts
    where: str = "last"  # the question stands; one of WHERE
    sentence: str = "next"  # which is asked for; one of ASKED
    form: str = "gap"  # of the question; one of FORMS
    names: str = "own"  # one of NAMES
    seed: int = 1  # chooses questions; divides documents, too, where the corpus' were not
    overwrite: bool = False  # replace a folder in ``dest`` that was made otherwise

    def check(self) -> None:
        """Refuse numbers out of range, naming the option."""
        ranges = {
            "tokens": (_LEAST_TOKENS, 1 << 24),
            "questions": (BINS, 1 << 32),
            "valid_questions": (BINS, 1 << 32),
            "valid_tokens": (_LEAST_TOKENS, 1 << 24),
            "shortest": (16, self.tokens // 2),
            "seed": (0, (1 << 63) - 1),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} {value} is out of range: use {least} to {most}")
        for name, value, known in (
            ("question", self.where, WHERE),
            ("sentence", self.sentence, ASKED),
            ("form", self.form, FORMS),
            ("names", self.names, NAMES),
        ):
            if value not in known:
                raise UserError(f"--{name} {value} is none of {', '.join(known)}")
        if self.form == "completion" and self.where != "last":
            raise UserError(f"--form completion asks last: leave out --question {self.where}")
        if self.sentence == "planted" and (self.form, self.names) != ("completion", "own"):
            wrong = "--names exchanged" if self.names != "own" else "--form gap"
            raise UserError(f"--sentence planted is completed, by a name that is drawn: {wrong} does not go with it")

    def wanted(self, split: str) -> int:
        """How many questions a split gets."""
        return self.questions if split == "train" else self.valid_questions

    def length(self, split: str) -> int:
        """The tokens of a context of a split."""
        return self.tokens if split == "train" else self.valid_tokens or self.tokens

    def filled(self, split: str) -> int:
        """How many of them are filled: exchanged names may be longer ones."""
        length = self.length(split)
        return length - length // 20 if self.names == "exchanged" else length


def make_gaps(options: GapOptions, say: Callable[[str], None] = print) -> Prepared:
    """Make the folder unless it is there already.

    Raises UserError: bad options or sources, documents that are too short, that have no names or too few questions.
    """
    options.check()
    texts = PrepareOptions(
        dest=options.dest,
        train=options.train,
        valid=options.valid,
        test=options.test,
        documents=options.documents,
        text_field=options.text_field,
        seed=options.seed,
        vocab_from=options.vocab_from,
    )
    texts.check()
    kind = (given_vocabulary(options.vocab_from, None) or ("", {}))[0]
    check_dest(options.dest)
    held_out = HeldOut(options.vocab_from)
    documents, division = held_out.documents(texts)
    if warning := held_out.warning(documents.digest):
        say(warning)
    choice = _Choice(options, documents, load_encoder(kind, options.vocab_from), say, held_out)
    lengths = dict.fromkeys(map(options.length, SPLITS))
    asked = AskedSet(
        name=options.dest.name,
        suite="gaps",
        title=f"{_TITLES[options.form]}, in {' and '.join(map(str, lengths))} tokens",
        metrics=("f1", "em"),
        published="f1",
        answer_tokens=ANSWER_TOKENS,
        splits={split: partial(choice.asked, split) for split in SPLITS},
    )
    places = ("dest", "vocab_from", "train", "valid", "test", "overwrite")
    chosen = {name: value for name, value in vars(options).items() if name not in places}
    source: dict[str, object] = {"texts": documents.digest, "options": chosen}
    if division != Division(options.seed):
        source["division"] = vars(division)
    return store(options.dest, [asked], options.vocab_from, MADE_BY, source, say, options.overwrite)


@dataclass
class _Looked:
    """What was found in the documents of a split."""

    documents: int = 0
    longest: int = 0  # document, in tokens
    names: int = 0


class _Choice:
    """The questions of each split that a hash of seed, document and place chooses, as many of each bin of distance."""

    def __init__(
        self,
        options: GapOptions,
        documents: DividedDocuments,
        encoder: Encoder,
        say: Callable[[str], None],
        held_out: HeldOut,
    ) -> None:
        self._held_out = held_out
        self._options, self._documents, self._encoder, self._say = options, documents, encoder, say
        # by split: by the number of its document
        self._chosen: dict[str, dict[int, list[Gap]]] = {}
        self._names: Counter[str] = Counter()  # of the training

    def asked(self, split: str) -> Iterator[Asked]:
        """The chosen questions of a split, in the order of the documents."""
        if not self._chosen:
            self._choose()
        left = dict(self._chosen[split])
        for number, document in enumerate(d for s, d in self._documents if s == split):
            gaps = left.pop(number, [])
            text = _text(document) if gaps else ""
            for gap in sorted(gaps, key=attrgetter("place", "end")):
                passage = text[gap.begin : gap.end]
                gap, passage = self._with_names(split, document, gap, passage)
                yield Asked(_question(number, passage, gap), partial(str, document.place), gap.guesses)
            if not left:
                break
        self._documents.check_unchanged()

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self._names, self._encoder.encode, self._options.seed)

    @cached_property
    def _planted(self) -> list[str]:
        return [name for name, _ in self._names.most_common(FREQUENT)]

    def _with_names(self, split: str, document: Document, gap: Gap, passage: str) -> tuple[Gap, str]:
        """A question and its passage with the names that are drawn for it, if any are."""
        if self._options.sentence == "planted":
            return plant(gap, passage, self._planted, f"{self._options.seed}\0{document.digest}")
        if self._options.names == "exchanged":
            return self._exchange(gap, passage, self._options.length(split) - ANSWER_TOKENS, document.digest)
        return gap, passage

    def _choose(self) -> None:
        options, looked = self._options, {split: _Looked() for split in SPLITS}
        heaps: dict[tuple[str, int], list[tuple[int, int, Gap]]] = defaultdict(list)
        with Progress("looking for questions", "documents", self._count()) as progress:
            for split, document in self._documents:
                there = looked[split]
                shortest = options.shortest if split == "train" else None
                passages = Places(_text(document), self._encoder.encode, self._can_be_answer, shortest)
                if options.sentence == "planted":
                    found = passages.places(options.length(split))
                else:
                    found = passages.gaps(options.filled(split), options.where, options.sentence, options.form)
                for gap in found:
                    heap = heaps[split, gap.bin]
                    # A heap gives up its smallest first: the one of the highest rank.
                    full = len(heap) == quotas(options.wanted(split))[gap.bin]
                    (heapq.heappushpop if full else heapq.heappush)(
                        heap, (-self._rank(document, gap), there.documents, gap)
                    )
                there.documents += 1
                there.longest = max(there.longest, passages.tokens)
                there.names += len(passages.names)
                if split == "train":
                    self._names.update(passages.counts())
                progress.update()
        for split in SPLITS:
            self._check(split, looked[split], [len(heaps[split, number]) for number in range(BINS)])
            chosen: dict[int, list[Gap]] = defaultdict(list)
            for number in range(BINS):
                for _, document_number, gap in heaps[split, number]:
                    chosen[document_number].append(gap)
            self._chosen[split] = chosen

    def _count(self) -> int:
        """How many documents there are; where a split got none of few, they are divided otherwise."""
        counts, splits = Counter[str](), dict[str, str]()
        for split, document in self._documents:
            counts[split] += 1
            if (other := splits.setdefault(document.digest, split)) != split:
                both = f"{document.place} has a document that the {other} split has, too"
                raise UserError(f"the {split} split: {both}: leave it out of one of them")
        empty = [split for split in SPLITS if not counts[split]]
        if empty:
            if (how := self._documents.divide_few()) is None:
                raise UserError(
                    f"the {empty[0]} split has no document: give more texts, or --train, --valid and --test"
                )
            self._say(how)
            digest = self._documents.digest
            if (warning := self._held_out.warning(digest, few=True)) and not self._held_out.warning(digest):
                self._say(warning)
            return sum(1 for _ in self._documents)
        return counts.total()

    def _can_be_answer(self, name: str) -> bool:
        ids = self._encoder.encode(f" {name}")
        return len(ids) < ANSWER_TOKENS and UNK not in ids

    def _rank(self, document: Document, gap: Gap) -> int:
        name = f"{self._options.seed}\0{document.digest}\0{gap.place}\0{gap.end}"
        return chance_of(name)

    def _check(self, split: str, looked: _Looked, found: list[int]) -> None:
        """Refuse a split that has fewer questions of some distance than wanted."""
        tokens, wanted = self._options.length(split), self._options.wanted(split)
        short = [number for number, (n, quota) in enumerate(zip(found, quotas(wanted), strict=True)) if n < quota]
        if not short:
            return
        less = "--tokens" if split == "train" or self._options.valid_tokens is None else "--valid-tokens"
        if looked.longest < tokens:
            longest = f"its longest document has {looked.longest} tokens"
            raise UserError(f"the {split} split has no passage of {tokens} tokens, {longest}: use fewer {less}")
        if not looked.names:
            what = "of words that are capitalised within sentences and hardly ever in lower case"
            raise UserError(f"the {split} split has no names, {what}: give other texts, such as novels")
        worst = min(short, key=lambda number: found[number])
        back = " to ".join(f"{100 * edge / BINS:g}" for edge in (worst, worst + 1))
        few = f"has {found[worst]} questions with the answer {back} % of the passage back, not {quotas(wanted)[worst]}"
        flag = "--questions" if split == "train" else "--valid-questions"
        least = BINS * found[worst]
        remedy = f"use {flag} {least} or give it more text" if least else f"give it more text or use fewer {less}"
        raise UserError(f"the {split} split {few}: {remedy}")


def _text(document: Document) -> str:
    return "".join(document.blocks())


def _question(number: int, passage: str, gap: Gap) -> Question:
    return Question(
        id=f"{number}-{gap.place}-{gap.end}",
        prompt=gap.prompt,
        answers=(gap.answer,),
        document=passage,
        cue=gap.cue,
        choices=gap.choices,
        distance=gap.distance,
    )
