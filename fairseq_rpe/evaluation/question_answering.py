"""Answers of a checkpoint to prepared questions, by context length: read, written or compared, and scored."""

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rpe.checkpoints.checkpoint import check_vocabulary
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.decoder.beam_search import beam
from fairseq_rpe.decoder.generation import check_fixed, greedy, likelihoods, settled
from fairseq_rpe.evaluation.exact_match import interpolated
from fairseq_rpe.evaluation.loading import check_plain, load
from fairseq_rpe.evaluation.question_records import QuestionKey, QuestionRequest, QuestionResult
from fairseq_rpe.evaluation.records import read, resumed
from fairseq_rpe.evaluation.score_by_distance import bands
from fairseq_rpe.questions import dataset, metrics
from fairseq_rpe.questions.dataset import Row, Rows, SetInfo
from fairseq_rpe.questions.metrics import Scored
from fairseq_rpe.questions.prompt import check_room, fitted
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.utils import files, records
from fairseq_rpe.utils.progress import Progress

# What bounds questions that are answered together: query-key pairs, for the memory of attention, and tokens, for that
# of the cache. One question may be more.
_PAIRS, _TOKENS, _ROWS = 1 << 23, 1 << 15, 256


@dataclass(frozen=True)
class _Batch:
    """Questions that are answered together: their places in the split, and their ids."""

    places: list[int]
    ids: list[str]


@dataclass(frozen=True)
class _Plan:
    """A measurement before it begins: which questions go together, and what the context length takes from them."""

    batches: list[_Batch]
    questions: int
    cut: int
    lost: int


@dataclass(frozen=True)
class _Part:
    """A line of what is kept of a measurement that is not finished: a batch."""

    answers: Mapping[str, str]
    seconds: float


def answered(request: QuestionRequest, bar: Progress) -> Iterator[QuestionResult]:
    """The results of what is asked for, in order; those that ``out`` has are not measured again.

    What has been answered of a result that is not finished is kept beside ``out``, and is not asked again. ``bar`` is
    told of the questions.

    Raises UserError: as :meth:`QuestionRequest.keys` and :func:`measuring`.
    """
    wanted = request.keys()
    if request.predictions is not None:
        files.check_folder(request.predictions, [_predictions(request, key).name for key in wanted], "--predictions")
        known = {result.key for result in (read(QuestionResult, request.out) if request.out else [])}
        for key in wanted:
            if key in known and not _predictions(request, key).is_file():
                raise UserError(
                    f"--out {request.out} has the result of {key.set} at {key.length} tokens, and --predictions "
                    "has not its answers: name another --out, or leave --predictions out"
                )
    last: QuestionKey | None = None
    for result in resumed(QuestionResult, request.out, wanted, partial(measuring, request, bar)):
        _forget(request, last)
        last = result.key
        yield result
    _forget(request, last)  # here the result is in ``out``


def measuring(
    request: QuestionRequest, bar: Progress, wanted: Sequence[QuestionKey]
) -> Callable[[QuestionKey], QuestionResult]:
    """Look at all questions that are asked for, and load the model that is to answer them.

    Raises UserError: a prompt alone is longer than the length, choices are lacking, or the checkpoint cannot be used:
    it is damaged, of another dictionary, or follows the length of the text in a way that has no answer.
    """
    checkpoint = checkpoints.load(request.checkpoint)
    check_plain(checkpoint)
    folder = dataset.load(request.data)
    check_vocabulary(checkpoint, read_dictionary(request.data / "dict.txt"), request.data)
    rows = folder.split(request.subset)
    asked: dict[str, list[tuple[int, Row]]] = {key.set: [] for key in wanted}
    for place, row in enumerate(rows):
        if row.set in asked:
            asked[row.set].append((place, row))
    plans = {key: _planned(key, rows, folder.sets[key.set], asked[key.set]) for key in wanted}
    model, _ = load(request.checkpoint, request, request.data, request.log)
    check_fixed(model)
    moves = model.decoder.moves
    given = str(request.positions or checkpoint.model.get("positions_eval") or moves.train.evaluation)
    for key in wanted:
        with settled(model, [[0]], [key.length]):  # refuses a length that has no positions
            pass

    def measure(key: QuestionKey) -> QuestionResult:
        plan, info, kept = plans[key], folder.sets[key.set], _kept(request, key)
        parts = _read(kept)
        found = {id: text for part in parts for id, text in part.answers.items()}
        for batch in plan.batches:
            if not all(id in found for id in batch.ids):
                start = time.monotonic()
                texts = _answers(model, key, rows, info, batch, bar.tick)
                part = _Part(dict(zip(batch.ids, texts, strict=True)), round(time.monotonic() - start, 3))
                parts.append(part)
                found.update(part.answers)
                _keep(kept, part)
            bar.update(len(batch.ids))
        texts = {row.id: found[row.id] for _, row in asked[key.set]}
        count = info.splits[key.subset].questions
        if not len(texts) == plan.questions == count:
            raise UserError(f"{key.set}: {len(texts)} of {count} questions were answered: the result is not kept")
        if request.predictions is not None:
            files.write_json(_predictions(request, key), texts)
        items = [rows.judged(row, texts[row.id]) for _, row in asked[key.set]]
        values, undefined = _scored(info, items)
        return QuestionResult(
            **vars(key),
            encoding=checkpoint.encoding,
            suite=info.suite,
            questions=count,
            metrics=values,
            published=info.published,
            score=values[info.published],
            cut_documents=plan.cut,
            lost_tokens=plan.lost,
            empty=sum(not text.strip() for text in texts.values()),
            undefined=undefined,
            transform=interpolated(given, checkpoint.train_length() or key.length, key.length),
            distances=bands(info.published, items, [row.distance for _, row in asked[key.set]]),
            seconds=round(sum(part.seconds for part in parts), 3),
        )

    bar.begin(sum(plan.questions for plan in plans.values()))
    return measure


def _planned(key: QuestionKey, rows: Rows, info: SetInfo, asked: Sequence[tuple[int, Row]]) -> _Plan:
    """Batches of a set's questions, the longest first, so that what is too much for the memory fails at once."""
    sizes, cut, lost = list[tuple[int, int, Row]](), 0, 0
    for place, row in asked:
        if key.by == "likelihood" and not row.choices:
            raise UserError(f"question '{row.id}' of {key.set} has no choices to compare: use --by generation")
        kept, document = rows.lengths(row)
        gone = max(0, document - check_room(kept, _room(key, rows, info, row), row.id))
        cut, lost = cut + (gone > 0), lost + gone
        sizes.append((kept + document - gone, place, row))
    batches = list[_Batch]()
    longest = copies = 0  # of the batch that is being filled: its first question's tokens, and all rows of the model
    for size, place, row in sorted(sizes, key=lambda one: (-one[0], one[1])):
        own = len(row.choices) if key.by == "likelihood" else key.beam
        more = copies + own
        fits = more <= _ROWS and more * (longest + info.answer_tokens) <= _TOKENS
        if not batches or not fits or (len(batches[-1].ids) + 1) * longest**2 > _PAIRS:
            batches.append(_Batch([], []))
            longest, more = size, own
        batches[-1].places.append(place)
        batches[-1].ids.append(row.id)
        copies = more
    return _Plan(batches, len(sizes), cut, lost)


def _room(key: QuestionKey, rows: Rows, info: SetInfo, row: Row) -> int:
    """Tokens that may be read of a question, beside its answer; choices that are longer take what they need."""
    written = info.answer_tokens
    if key.by == "likelihood":
        written = max(written, 1 + max(int(rows.sizes[choice]) for choice in row.choices))
    return key.length - written


def _answers(
    model: Any, key: QuestionKey, rows: Rows, info: SetInfo, batch: _Batch, tick: Callable[[], object]
) -> list[str]:
    """The texts that the model answers a batch with; ``tick`` is called after each step."""
    asked = [rows[place] for place in batch.places]
    prompts = []
    for row in asked:
        prompts.append(fitted(*rows.parts(row), _room(key, rows, info, row), key.cut, row.id)[0].tolist())
    if key.by == "likelihood":
        choices = [[rows.tokens(choice).tolist() for choice in row.choices] for row in asked]
        found = likelihoods(model, prompts, choices, key.length)
        best = (max(range(len(own)), key=own.__getitem__) for own in found)
        return [rows.text(row.choices[place]).strip() for row, place in zip(asked, best, strict=True)]
    if key.beam == 1:
        written = greedy(model, prompts, info.answer_tokens, key.length, tick)
    else:
        penalty = 1.0 if key.length_penalty is None else key.length_penalty
        several = beam(model, prompts, info.answer_tokens, key.beam, penalty, key.length, tick)
        written = [own[0].tokens if own else [] for own in several]
    return [rows.decode(tokens).strip() for tokens in written]


def _scored(info: SetInfo, items: Sequence[Scored]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The values of all metrics of a set, and the names of those that are undefined."""
    values, undefined = dict[str, float](), list[str]()
    for metric in dict.fromkeys((*info.metrics, info.published)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", metrics.Undefined)
            values[metric] = metrics.score(metric, items)
        undefined += [metric] * any(issubclass(one.category, metrics.Undefined) for one in said)
    return values, tuple(undefined)


def _predictions(request: QuestionRequest, key: QuestionKey) -> Path:
    assert request.predictions is not None
    return request.predictions / f"{_named(key)}.json"


def _named(key: QuestionKey) -> str:
    """A file name of this measurement alone."""
    same = hashlib.sha256(json.dumps(records.write(key), sort_keys=True).encode()).hexdigest()[:12]
    plain = re.sub(r"[^\w.-]", "_", key.set)
    return f"{plain}-{key.length}-{same}"


def _kept(request: QuestionRequest, key: QuestionKey) -> Path | None:
    """Where the answers of an unfinished measurement are kept; nowhere without ``out``."""
    if request.out is None:
        return None
    return request.out.with_name(f"{request.out.name}.{_named(key)}.partial")


def _read(path: Path | None) -> list[_Part]:
    """What is kept; a last line that a kill has left half-written is none."""
    if path is None or not path.exists():
        return []
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(path, end)
    return records.read_lines(_Part, path, "the answers")


def _keep(path: Path | None, part: _Part) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.naming(path), open(path, "ab") as file:
        file.write(json.dumps(records.write(part)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _forget(request: QuestionRequest, key: QuestionKey | None) -> None:
    kept = None if key is None else _kept(request, key)
    if kept is not None:
        kept.unlink(missing_ok=True)
