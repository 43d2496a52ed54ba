"""Questions of known sets, or of a user's own files, into one prepared folder."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.sourcefiles import Entry, digest_entries
from fairseq_rpe.questions import benchmarks, metrics, question
from fairseq_rpe.questions.benchmarks import KnownSet
from fairseq_rpe.questions.dataset import Prepared
from fairseq_rpe.questions.dataset_writer import Asked, AskedSet, check_dest, store
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import file_digest, open_input
from fairseq_rpe.utils.records import Words
from fairseq_rpe.utils.table import Cell, Row, Table

ANSWER_TOKENS = 64
METRIC = "f1"
MADE_BY = "fairseq-rpe prepare-answers"


@dataclass(frozen=True)
class AnswerOptions:
    """Which questions to prepare, and where."""

    dest: Path
    vocab_from: Path  # a prepared corpus whose tokenizer is taken
    names: Words = ()  # of known sets
    local: str | None = None  # folder or archive that they are in, as their authors ship them; None is the hub
    counts: bool = True  # refuse a known set that has another number of examples than published
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)  # of own questions, by split
    name: str = ""  # of the set of own questions
    metrics: Words = ()  # of own questions, the one that counts first
    answer_tokens: int | None = None  # most of an answer, its end symbol included; None is what each set has
    overwrite: bool = False  # replace a folder in ``dest`` that was made of others

    def check(self) -> None:
        """Refuse what does not go together, naming the option."""
        own = [split for split in SPLITS if self.files.get(split)]
        if self.names and own:
            raise UserError(f"NAME and --{own[0]} are both given: name known sets, or give files of your own")
        if not self.names:
            if "train" not in own or "valid" not in own:
                raise UserError("no questions are given: name known sets, or give --train and --valid with JSON lines")
            for flag, given in (("--from", self.local is not None), ("--no-counts", not self.counts)):
                if given:
                    raise UserError(f"{flag} is for known sets and none is named: leave it out")
            name = self.name or self.dest.name
            if any("\ud800" <= letter <= "\udfff" for letter in name):  # bytes of a name that are no UTF-8
                raise UserError(f"--name {name!r} is not UTF-8, so the folder could not be read: give another")
        elif self.name or self.metrics:
            flag = "--name" if self.name else "--metric"
            raise UserError(f"{flag} is for questions of your own files, a known set has its own: leave it out")
        if len(set(self.names)) < len(self.names):
            raise UserError(f"{', '.join(self.names)}: a set is named twice: name it once")
        if unknown := [metric for metric in self.metrics if metric not in metrics.names()]:
            raise UserError(f"--metric {unknown[0]} is unknown: use {', '.join(metrics.names())}")
        if self.answer_tokens is not None and self.answer_tokens < 2:
            raise UserError(f"--answer-tokens {self.answer_tokens} is out of range: use 2 or more")


def make_answers(options: AnswerOptions, say: Callable[[str], None] = print) -> Prepared:
    """Make the folder unless it is there already.

    Raises UserError: bad options or questions; nothing is changed then.
    """
    options.check()
    check_dest(options.dest)
    asked, source = _known(options, say) if options.names else _own(options)
    prepared = store(options.dest, asked, options.vocab_from, MADE_BY, source, say, options.overwrite)
    say(summary(prepared))
    return prepared


def _known(options: AnswerOptions, say: Callable[[str], None]) -> tuple[list[AskedSet], dict[str, object]]:
    asked, digests = [], {}
    for one in map(benchmarks.load, options.names):
        files = {split: one.find(options.local, split) for split in one.counts}
        reading = {
            split: partial(_read_known, one, split, found, options.counts, say) for split, found in files.items()
        }
        tokens = options.answer_tokens or one.answer_tokens
        asked.append(AskedSet(one.name, one.suite, one.metrics, one.published, tokens, reading, one.title))
        described = hashlib.sha256(json.dumps(records.write(one), sort_keys=True).encode()).hexdigest()
        digests[one.name] = {"set": described, **{split: digest_entries(found, True) for split, found in files.items()}}
    return asked, {"files": digests, "options": {"counts": options.counts, "answer_tokens": options.answer_tokens}}


def _read_known(
    one: KnownSet, split: str, files: Sequence[Entry], counts: bool, say: Callable[[str], None]
) -> Iterator[Asked]:
    skipped = Counter[str]()
    for asked, source in one.questions(split, files, counts, skipped):
        yield Asked(asked, partial(str, source))
    if skipped:
        left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        say(f"{one.name} {split}: left out {left_out}")


def _own(options: AnswerOptions) -> tuple[list[AskedSet], dict[str, object]]:
    files = {split: tuple(options.files[split]) for split in SPLITS if options.files.get(split)}
    metrics = options.metrics or (METRIC,)
    asked = AskedSet(
        name=options.name or options.dest.name,
        suite="own",
        metrics=metrics,
        published=metrics[0],
        answer_tokens=options.answer_tokens or ANSWER_TOKENS,
        splits={split: partial(_read, paths) for split, paths in files.items()},
        whole_answers=True,
    )
    digests = {split: [file_digest(path) for path in paths] for split, paths in files.items()}
    given = {"name": asked.name, "metrics": list(metrics), "answer_tokens": asked.answer_tokens}
    return [asked], {"files": digests, "options": given}


def _read(paths: Sequence[Path]) -> Iterator[Asked]:
    return chain.from_iterable(map(_read_file, paths))


def _read_file(path: Path) -> Iterator[Asked]:
    for number, one in enumerate(question.read(path)):
        yield Asked(one, partial(_place, path, number))


def _place(path: Path, number: int) -> str:
    """File and line of a question of a file, by its number from 0: blank lines are none."""
    with open_input(path) as file:
        lines = [line for line, text in enumerate(file, start=1) if text.strip()]
    return f"{path} line {lines[number]}"


def summary(prepared: Prepared) -> str:
    """A table of what a folder holds, a line for each set and split, with how often guesses are right."""
    head = ["set", "questions", "answers", "texts", "tokens", "longest", "answers to be cut"]
    infos = [(name, split, info.splits[split]) for name, info in prepared.sets.items() for split in info.splits]
    guesses = list(dict.fromkeys(guess for *_, info in infos for guess in info.guesses))
    unknown = any(info.unknown for *_, info in infos)
    rows = []
    for name, split, info in infos:
        numbers = (info.questions, info.answers, info.documents, info.tokens, info.longest, info.cut_answers)
        cells = [f"{number:,}" for number in numbers]
        cells += [f"{100 * info.unknown / info.tokens:.2f} %"] if unknown else []
        cells += [f"{info.guesses[guess]:.1f} %" if guess in info.guesses else "" for guess in guesses]
        rows.append(Row(f"{name} {split}", [Cell(cell) for cell in cells]))
    return Table("what was made", [*head, *(["unknown"] if unknown else []), *guesses], rows).markdown().rstrip()
