"""Questions into a prepared folder: streamed, each different text encoded and stored once, all or nothing."""

import contextlib
import io
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.atomic_folder import Contents, make_once
from fairseq_rpe.data.encoders import UNK, load_decoder, load_encoder
from fairseq_rpe.data.folder import ANSWERS, SPLITS, describe_files, write_index
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES, Given, given_vocabulary
from fairseq_rpe.questions import metrics
from fairseq_rpe.questions.dataset import ROWS, Prepared, SetInfo, SplitInfo, load, read_answers
from fairseq_rpe.questions.metrics import Scored
from fairseq_rpe.questions.question import Question
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import check_folder, file_digest
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import Words

# Raised when the same questions and options give other files than before.
_FORMAT = 1
CONTENTS = Contents(ANSWERS, read_answers, ROWS)


@dataclass(frozen=True)
class Asked:
    """A question on its way into a folder."""

    question: Question
    place: Callable[[], str]  # gives its file and line
    guesses: Mapping[str, str] = field(default_factory=dict)  # answers without any model, by the way to guess


@dataclass(frozen=True)
class AskedSet:
    """A set of questions to be stored; ``splits`` gives those of each split, and is called once."""

    name: str
    suite: str
    metrics: Words
    published: str
    answer_tokens: int
    splits: Mapping[str, Callable[[], Iterator[Asked]]]
    title: str = ""
    whole_answers: bool = False  # refuse answers of more tokens, instead of counting them


def store(
    dest: Path,
    sets: Sequence[AskedSet],
    vocab_from: Path,
    made_by: str,
    source: Mapping[str, object],
    say: Callable[[str], None] = print,
    overwrite: bool = False,
) -> Prepared:
    """Make the prepared folder unless it is there already, made of the same.

    Args:
        dest: the folder; ``sets``: what it shall hold.
        vocab_from: a prepared corpus, whose tokenizer and dictionary are taken.
        made_by: the command; ``source``: what decides the questions, as JSON keeps it.
        overwrite: replace a folder that was made otherwise.

    Raises:
        UserError: two questions of a split and set have one id, a text cannot be got back from its tokens, an answer
            has an unknown word or too many tokens, a metric cannot judge a question, or one of what reads the
            questions; nothing is changed then.
    """
    given = given_vocabulary(vocab_from, None)
    assert given is not None
    key = {
        "format": _FORMAT,
        "made_by": made_by,
        "source": source,
        "given_vocabulary": {name: file_digest(path) for name, path in given[1].items()},
    }
    make_once(dest, key, lambda made: _build(sets, given, made), say, CONTENTS, overwrite)
    return load(dest)


def check_dest(dest: Path) -> None:
    """Refuse, before any work, a folder that could not be made."""
    if os.pathsep in str(dest):
        raise UserError(f"--dest {dest} has a '{os.pathsep}', where fairseq splits paths: rename it")
    if not dest.is_dir():
        check_folder(dest, flag="--dest")


def _build(sets: Sequence[AskedSet], given: Given, made: Path) -> dict[str, Any]:
    kind, files = given
    for name, path in files.items():
        shutil.copyfile(path, made / name)
    infos, names = {}, ["dict.txt", *VOCABULARY_FILES[kind]]
    with contextlib.ExitStack() as stack:
        writers = {}
        for split in SPLITS:
            if any(split in one.splits for one in sets):
                writers[split] = stack.enter_context(_SplitWriter(made, split, kind))
                names += [f"{split}.bin", f"{split}.idx", f"{split}.rows.jsonl"]
        for one in sets:
            found = {split: writers[split].write(one, read()) for split, read in one.splits.items()}
            infos[one.name] = records.filled(SetInfo, one, splits=found)
    return {
        "tokenizer": {"kind": kind},
        "sets": {name: records.write(info) for name, info in infos.items()},
        "files": describe_files(made, names),
    }


def _name(text: str | bytes) -> bytes:
    """What stands for a text in memory."""
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return blake2b(content, digest_size=16).digest()


def _judged(each: Asked, one: AskedSet, first: Scored | None) -> Scored:
    """Refuse a question that a metric of its set cannot judge, together with the first one, which is given back."""
    choices = tuple(dict.fromkeys(map(metrics.tidied, each.question.choices)))
    item = Scored("", each.question.answers, choices=choices)
    for metric in dict.fromkeys((*one.metrics, one.published)):
        try:
            metrics.check_answers(metric, first or item, item)
        except UserError as error:
            raise UserError(f"{each.place()}: question '{each.question.id}': {error}") from None
    return first or item


class _SplitWriter:
    """Writes the items and rows of a split; in memory are digests of texts, never the texts."""

    def __init__(self, folder: Path, split: str, kind: str) -> None:
        self._folder, self._split, self._exact = folder, split, kind != "words"
        self._encoder, self._decode = load_encoder(kind, folder), load_decoder(kind, folder)
        self._items: dict[bytes, int] = {}
        self._sizes, self._unknown = array("i"), array("i")
        self._bin = open(folder / f"{split}.bin", "wb")
        self._rows = open(folder / f"{split}.rows.jsonl", "wb")

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bin.close()
        self._rows.close()
        if kind is None:
            write_index(self._folder / f"{self._split}.idx", io.BytesIO(self._sizes.tobytes()), self._encoder.dtype)

    def write(self, one: AskedSet, asked: Iterator[Asked]) -> SplitInfo:
        """Append the questions of a set."""
        counts, right, ids, documents = Counter[str](), Counter[str](), set[bytes](), set[int]()
        first: Scored | None = None
        with Progress(f"{one.name}, {self._split}", "questions") as progress:
            for each in asked:
                question = each.question
                first = _judged(each, one, first)
                if (name := _name(question.id)) in ids:
                    again = f"id '{question.id}' is there a second time in the {self._split} split"
                    raise UserError(f"{each.place()}: {again} of {one.name}: let every question have its own")
                ids.add(name)
                row = self._row(each, one, counts)
                documents.update([row["document"]] if "document" in row else [])
                right.update(guess for guess, item in row.get("guesses", {}).items() if item in row["answers"])
                right.update(dict.fromkeys(row.get("guesses", {}), 0))
                self._rows.write(json.dumps(row).encode() + b"\n")
                progress.update()
        if not counts["questions"]:
            raise UserError(f"the {self._split} split of {one.name} has no question: give other files")
        guesses = {guess: 100 * count / counts["questions"] for guess, count in sorted(right.items())}
        return SplitInfo(**counts, documents=len(documents), guesses=guesses)

    def _row(self, each: Asked, one: AskedSet, counts: Counter[str]) -> dict[str, Any]:
        question, asked = each.question, {}
        for key in ("prompt", "document", "cue"):
            if text := getattr(question, key):
                asked[key] = self._item(text, f"the {key}", each)
        tokens = sum(self._sizes[item] for item in asked.values())
        # Tokenizers have the blank before a word with the word.
        blank = "" if (question.prompt + question.document + question.cue)[-1].isspace() else " "

        def said(text: str, what: str) -> int:
            item = self._item(blank + " ".join(text.split()), what, each)
            if self._unknown[item]:
                lacking = f"{what} {text!r} has words that the dictionary lacks"
                raise UserError(f"{each.place()}: {lacking}: leave it out or take another vocabulary")
            if (size := self._sizes[item] + 1) > one.answer_tokens and one.whole_answers:
                most = f"more than {one.answer_tokens}: leave it out or allow it with --answer-tokens {size}"
                raise UserError(f"{each.place()}: {what} of '{question.id}' has {size} tokens with its end, {most}")
            return item

        answers = [said(text, "the answer") for text in question.answers]
        row = {"id": question.id, "set": one.name, **asked, "answers": answers}
        if question.group:
            row["group"] = question.group
        if question.choices:
            row["choices"] = list(dict.fromkeys(said(text, "the choice") for text in question.choices))
        if question.distance is not None:
            row["distance"] = question.distance
        if each.guesses:
            row["guesses"] = {guess: said(text, "the guess") for guess, text in each.guesses.items()}
        counts.update(questions=1, answers=len(answers), tokens=tokens)
        counts["longest"] = max(counts["longest"], tokens)
        counts["cut_answers"] += sum(self._sizes[item] >= one.answer_tokens for item in answers)
        counts["unknown"] += sum(self._unknown[item] for item in asked.values())
        return row

    def _item(self, text: str, what: str, each: Asked) -> int:
        """The number of a text in the split, stored if it is not there yet."""
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            half = f"{what} of '{each.question.id}' has half a surrogate pair at character {error.start}"
            raise UserError(f"{each.place()}: {half}, which is not text: repair or remove it") from None
        name = _name(content)
        if name not in self._items:
            try:
                ids = self._encoder.encode(text)
            except UserError as error:
                raise UserError(f"{each.place()}: {what} of '{each.question.id}': {error}") from None
            if self._exact and self._decode(ids.tolist()) != content:
                raise UserError(
                    f"{each.place()}: the tokenizer of --vocab-from cannot give back {what} of '{each.question.id}': "
                    "leave it out or take another vocabulary"
                )
            self._bin.write(ids.tobytes())
            self._items[name] = len(self._sizes)
            self._sizes.append(len(ids))
            self._unknown.append(int((ids == UNK).sum()))
        return self._items[name]
