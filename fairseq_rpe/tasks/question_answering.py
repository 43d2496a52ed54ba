"""The fairseq task ``rpe_answers``: questions about texts, of which only the answers are to be learned."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import meters, metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II

from fairseq_rpe.checkpoints import checkpoint
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.generation import check_fixed, greedy
from fairseq_rpe.questions import dataset
from fairseq_rpe.questions.metrics import check
from fairseq_rpe.questions.mixture import FORMS
from fairseq_rpe.questions.prompt import CUTS, check_cut
from fairseq_rpe.questions.streaming_metrics import adds_up, part, whole
from fairseq_rpe.tasks.question_dataset import QuestionRows, group_of

logger = logging.getLogger(__name__)
_SUMS, _SCORE = "_answers_", "answers_"

# no `X | None` and no postponed annotations here: fairseq's parser reads these annotations at run time


@dataclass
class AnswersConfig(FairseqDataclass):
    """Flags of the task; those without a help text are flags of fairseq's, or what its language models ask of one."""

    data: Optional[str] = field(default=None, metadata={"help": "folder of fairseq-rpe prepare-answers"})
    tokens_per_sample: int = field(
        default=1024, metadata={"help": "most tokens of a row: prompt, document, cue, and answer with its end"}
    )
    cut: str = field(
        default="end", metadata={"help": f"where a document that is too long loses tokens: {', '.join(CUTS)}"}
    )
    mixture: str = field(
        default="proportional",
        metadata={"help": f"rows of each set in an epoch: {FORMS}; an epoch has as many rows as the folder"},
    )
    eval_answers: bool = field(
        default=False,
        metadata={
            "help": "in validation write answers too, by the likeliest tokens, and log 'answers', the mean over sets "
            "of what each is scored by, e.g. for --best-checkpoint-metric answers --maximize-best-checkpoint-metric"
        },
    )
    max_target_positions: Optional[int] = field(default=None, metadata={"help": "refused: any length is accepted"})
    add_bos_token: bool = field(default=False, metadata={"help": "refused: a row begins with its prompt"})
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")


class _Score(meters.Meter):
    """What a set is scored by, over all questions of a validation so far."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.reset()

    def reset(self) -> None:
        self.total: Any = 0.0

    def update(self, sums: np.ndarray) -> None:
        self.total = self.total + sums

    @property
    def value(self) -> Optional[float]:
        return None if np.ndim(self.total) == 0 else whole(self.metric, self.total)

    @property
    def smoothed_value(self) -> float:
        return round(self.value or 0.0, 4)


def _mean(found: meters.MetersDict) -> float:
    """Over the sets of which something was asked."""
    scores = [one.value for one in found.values() if isinstance(one, _Score)]
    asked = [score for score in scores if score is not None]
    return round(sum(asked) / len(asked), 4) if asked else 0.0


def _judged(sets: Mapping[str, dataset.SetInfo]) -> list[str]:
    """The sets whose score adds up over batches."""
    return [name for name, info in sets.items() if adds_up(info.published)]


@register_task("rpe_answers", dataclass=AnswersConfig)
class AnswersTask(FairseqTask):
    """Learn to answer questions about texts. The splits are those of a prepared folder.

    A batch is as for ``rpe_algorithmic``: padded on the right, the answer marked; rows of similar length are together,
    so ``--max-tokens`` fills batches well. A row's first token is the prompt's first; the answer's end, ``</s>``, is
    learned with it. The encodings' training length is ``--rpe-train-length``, by default ``--tokens-per-sample``.
    """

    def __init__(self, cfg: AnswersConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self._dictionary = dictionary
        self._validated: Optional[QuestionRows] = None

    @classmethod
    def setup_task(cls, cfg: AnswersConfig, **kwargs: Any) -> "AnswersTask":
        """Raises UserError: no dictionary in the folder, or flags that are wrong or would have no effect.

        The folder's questions are looked at when a split is loaded: a text has the dictionary too.
        """
        for name in ("max_target_positions", "add_bos_token"):
            if getattr(cfg, name, None):
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} has no effect on rpe_answers, whose rows are as they are prepared: drop it")
        check_cut(cfg.cut)
        path = Path(cfg.data or "") / "dict.txt"
        if not cfg.data or not path.is_file():
            raise UserError(f"data {cfg.data}: no dict.txt there; name a folder of fairseq-rpe prepare-answers")
        dictionary = Dictionary.load(str(path))
        logger.info(f"dictionary: {len(dictionary):,} types")
        return cls(cfg, dictionary)

    @cached_property
    def prepared(self) -> dataset.Prepared:
        return dataset.load(Path(self.cfg.data))

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        """Raises UserError: the folder has no such split, or a question of it cannot be asked."""
        train = split == self.cfg.train_subset
        rows, length = self.prepared.split(split), self.cfg.tokens_per_sample
        mixture = self.cfg.mixture if train else None
        self.datasets[split] = QuestionRows(
            split, rows, self.prepared.sets, self._dictionary, length, self.cfg.cut, mixture, self.cfg.seed
        )
        logger.info(f"loaded {len(rows):,} examples from: {self.cfg.data}/{split}")

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Raises UserError: it would begin with a checkpoint of another vocabulary, or cannot write answers."""
        first = self.cfg.finetune_from_model
        if not from_checkpoint and first and Path(first).is_file():
            self._check_first(checkpoint.load(Path(first)), cfg.rpe_train_length)
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.eval_answers and not from_checkpoint:
            check_fixed(model)
            self._check_scores()
        return model

    def _check_scores(self) -> None:
        sets = self.prepared.sets
        judged = _judged(sets)
        check(*(sets[name].published for name in judged))
        for name in (name for name in sets if name not in judged):
            logger.warning(
                f"{name} is scored by {sets[name].published}, which is no mean over questions: 'answers' leaves it out"
            )
        if not judged:
            raise UserError("--eval-answers: no set of the data is scored by a mean over questions: drop the flag")

    def get_batch_iterator(self, dataset: QuestionRows, *args: Any, **kwargs: Any) -> Any:
        """Of fairseq's trainer, which asks for one before every validation."""
        if dataset.mixture is None:
            self._validated = dataset
        return super().get_batch_iterator(dataset, *args, **kwargs)

    def _check_first(self, first: checkpoint.State, length: Optional[int]) -> None:
        checkpoint.check_vocabulary(first, self._dictionary.symbols, self.cfg.data)
        own, length = first.train_length(), length or self.cfg.tokens_per_sample
        if own and own != length:
            logger.warning(
                f"{first.path} was trained at {own} tokens; encodings that go by the training length now go by "
                f"{length}: give --rpe-train-length {own} to keep its own"
            )

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> Any:
        """The loss, and with --eval-answers what adds up to the scores of the answers that the model writes."""
        loss, size, log = super().valid_step(sample, model, criterion)
        return loss, size, {**log, **self._answered(sample, model)} if self.cfg.eval_answers else log

    def _answered(self, sample: Any, model: Any) -> dict[str, Any]:
        data = self._validated
        assert data is not None
        asked: dict[str, list[int]] = {name: [] for name in _judged(data.sets)}
        # of several processes one that has nothing left is given rows of the training, and what it logs is not counted
        for index in sample["id"].tolist() if sample["split"] == data.split else ():
            asked.get(data.question(index).set, []).append(index)
        found = {}
        for name, indices in asked.items():
            info, groups = data.sets[name], data.groups[name]
            prompts = [row[:prompt].tolist() for row, prompt in map(data.row, indices)]
            most, length = info.answer_tokens, self.cfg.tokens_per_sample
            written = greedy(model, prompts, most, length) if prompts else []
            items, belongs = [], []
            for row, tokens in zip(map(data.question, indices), written, strict=True):
                items.append(data.rows.judged(row, data.rows.decode(tokens).strip()))
                belongs.append(groups[group_of(row)])
            found[_SUMS + name] = torch.from_numpy(part(info.published, items, belongs, len(groups)))
        return found

    def reduce_metrics(self, logging_outputs: Any, criterion: Any) -> None:
        """As the criterion says, and the scores of the answers."""
        super().reduce_metrics(logging_outputs, criterion)
        for key in (key for key in (logging_outputs or [{}])[0] if key.startswith(_SUMS)):
            name, total = key.removeprefix(_SUMS), sum(log[key] for log in logging_outputs if key in log)
            metric = self.prepared.sets[name].published
            metrics.log_custom(partial(_Score, metric), _SCORE + name, total.cpu().numpy(), priority=15)
            metrics.log_derived("answers", _mean, priority=14)

    @property
    def source_dictionary(self) -> Dictionary:
        return self._dictionary

    target_dictionary = source_dictionary
