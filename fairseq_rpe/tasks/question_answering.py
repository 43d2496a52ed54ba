"""fairseq task ``rpe_answers``: question answering on a prepared data set, of which only the answers are learned."""

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
from fairseq_rpe.decoder.generation import check_length_independent, greedy_search
from fairseq_rpe.questions import dataset
from fairseq_rpe.questions.metrics import check_metrics, is_streamable, metric_from_sums, partial_sums
from fairseq_rpe.questions.mixture import MIXTURES
from fairseq_rpe.questions.prompt import TRUNCATE, check_truncate
from fairseq_rpe.tasks.question_dataset import QuestionAnswerDataset, score_group

logger = logging.getLogger(__name__)
# Prefixes of a set's name in fairseq's log: of its partial sums, which are not shown, and of its score.
_SUMS_PREFIX, _SCORE_PREFIX = "_answers_", "answers_"

# no `X | None` and no postponed annotations here: fairseq's parser reads these annotations at run time


@dataclass
class QuestionAnsweringConfig(FairseqDataclass):
    """Flags of the task; fields without a help text are flags of fairseq."""

    data: Optional[str] = field(default=None, metadata={"help": "folder of fairseq-rpe prepare-questions"})
    tokens_per_sample: int = field(
        default=1024, metadata={"help": "most tokens of a row: prompt, document, cue and answer with its end"}
    )
    truncate: str = field(
        default="end", metadata={"help": f"where a document that is too long is truncated: {', '.join(TRUNCATE)}"}
    )
    mixture: str = field(
        default="proportional",
        metadata={"help": f"rows of each set in an epoch: {MIXTURES}; an epoch has as many rows as the folder"},
    )
    eval_answers: bool = field(
        default=False,
        metadata={
            "help": "generate answers greedily in validation too and log their mean score 'answers', e.g. for "
            "--best-checkpoint-metric answers --maximize-best-checkpoint-metric"
        },
    )
    max_target_positions: Optional[int] = field(default=None, metadata={"help": "refused: any length is accepted"})
    add_bos_token: bool = field(default=False, metadata={"help": "refused: a row begins with its prompt"})
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")
    valid_subset: str = II("dataset.valid_subset")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")


class _Score(meters.Meter):
    """Score of a question set over all questions of a validation so far."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.reset()

    def reset(self) -> None:
        self.total: Any = 0.0

    def update(self, sums: np.ndarray) -> None:
        self.total = self.total + sums

    @property
    def value(self) -> Optional[float]:
        return None if np.ndim(self.total) == 0 else metric_from_sums(self.metric, self.total)

    @property
    def smoothed_value(self) -> float:
        return round(self.value or 0.0, 4)


def _mean_score(all_meters: meters.MetersDict) -> float:
    """Return the mean score of the sets with at least one question."""
    values = [meter.value for meter in all_meters.values() if isinstance(meter, _Score)]
    scores = [value for value in values if value is not None]
    return round(sum(scores) / len(scores), 4) if scores else 0.0


def _scored_sets(sets: Mapping[str, dataset.SetInfo]) -> list[str]:
    """Return the sets whose score can be accumulated over batches."""
    return [name for name, info in sets.items() if is_streamable(info.published)]


@register_task("rpe_answers", dataclass=QuestionAnsweringConfig)
class QuestionAnsweringTask(FairseqTask):
    """Question answering on the splits of a prepared question data set.

    Batches are those of ``rpe_algorithmic``: padded on the right, with a mask of the answer. Rows of similar length are
    batched together, so ``--max-tokens`` wastes little padding. A row starts with the first token of its prompt, and
    the answer's end, ``</s>``, is learned. The training length of encodings is ``--rpe-train-length``, by default
    ``--tokens-per-sample``.
    """

    def __init__(self, cfg: QuestionAnsweringConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self._dictionary = dictionary
        self._validated: Optional[QuestionAnswerDataset] = None

    @classmethod
    def setup_task(cls, cfg: QuestionAnsweringConfig, **kwargs: Any) -> "QuestionAnsweringTask":
        """Build the task; its questions are read when a split is loaded.

        Raises:
            UserError: the folder has no dictionary, or a flag is wrong or has no effect.
        """
        for name in ("max_target_positions", "add_bos_token"):
            if getattr(cfg, name, None):
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} has no effect on rpe_answers, whose rows are prepared: drop it")
        check_truncate(cfg.truncate)
        if cfg.eval_answers and cfg.train_subset in (cfg.valid_subset or "").split(","):
            raise UserError(
                f"--eval-answers: the answers of '{cfg.train_subset}', the training split, are not scored: leave it "
                "out of --valid-subset"
            )
        path = Path(cfg.data or "") / "dict.txt"
        if not cfg.data or not path.is_file():
            raise UserError(f"data {cfg.data}: no dict.txt there; name a folder of fairseq-rpe prepare-questions")
        dictionary = Dictionary.load(str(path))
        logger.info(f"dictionary: {len(dictionary):,} types")
        return cls(cfg, dictionary)

    @cached_property
    def prepared(self) -> dataset.QuestionDataset:
        """The prepared question data set."""
        return dataset.load_dataset(Path(self.cfg.data))

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        """Load a split.

        Raises:
            UserError: the folder has no such split, or a question does not fit.
        """
        rows = self.prepared.split(split)
        self.datasets[split] = QuestionAnswerDataset(
            split,
            rows,
            sets=self.prepared.sets,
            dictionary=self._dictionary,
            length=self.cfg.tokens_per_sample,
            truncate=self.cfg.truncate,
            mixture=self.cfg.mixture if split == self.cfg.train_subset else None,
            seed=self.cfg.seed,
        )
        logger.info(f"loaded {len(rows):,} examples from: {self.cfg.data}/{split}")

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model.

        Raises:
            UserError: the checkpoint to fine-tune has another vocabulary, or the model cannot generate answers.
        """
        finetune_from = self.cfg.finetune_from_model
        if not from_checkpoint and finetune_from and Path(finetune_from).is_file():
            self._check_finetuning(checkpoint.load_checkpoint(Path(finetune_from)), cfg.rpe_train_length)
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.eval_answers and not from_checkpoint:
            check_length_independent(model)
            self._check_scores()
        return model

    def _check_scores(self) -> None:
        """Check that generated answers can be scored; warn of sets whose metric is no mean over questions."""
        sets = self.prepared.sets
        scored = _scored_sets(sets)
        check_metrics(*(sets[name].published for name in scored))
        for name in (name for name in sets if name not in scored):
            logger.warning(
                f"{name} is scored by {sets[name].published}, which is no mean over questions: 'answers' leaves it out"
            )
        if not scored:
            raise UserError("--eval-answers: no set of the data is scored by a mean over questions: drop the flag")

    def get_batch_iterator(self, dataset: QuestionAnswerDataset, *args: Any, **kwargs: Any) -> Any:
        """Return batches of a dataset, and remember it if it is validated; fairseq calls this."""
        if dataset.mixture is None:
            self._validated = dataset
        return super().get_batch_iterator(dataset, *args, **kwargs)

    def _check_finetuning(self, first: checkpoint.Checkpoint, length: Optional[int]) -> None:
        """Check the vocabulary of the checkpoint to fine-tune; warn if the encodings get another training length."""
        checkpoint.check_vocabulary(first, self._dictionary.symbols, self.cfg.data)
        trained_length, length = first.train_length(), length or self.cfg.tokens_per_sample
        if trained_length and trained_length != length:
            logger.warning(
                f"{first.path} was trained at {trained_length} tokens; encodings that use the training length now use "
                f"{length}: give --rpe-train-length {trained_length} to keep its own"
            )

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> Any:
        """Compute the loss of a validation batch, and with --eval-answers the partial scores of generated answers."""
        loss, size, log = super().valid_step(sample, model, criterion)
        return loss, size, {**log, **self._partial_scores(sample, model)} if self.cfg.eval_answers else log

    def _partial_scores(self, sample: Any, model: Any) -> dict[str, Any]:
        """Return the partial sums of the scores of each set, by their names in fairseq's log."""
        data = self._validated
        assert data is not None
        rows_of_set: dict[str, list[int]] = {name: [] for name in _scored_sets(data.sets)}
        # a process without validation rows left gets a batch of training rows, whose log fairseq ignores
        for index in sample["id"].tolist() if sample["split"] == data.split else ():
            rows_of_set.get(data.question(index).set, []).append(index)
        return {
            _SUMS_PREFIX + name: torch.from_numpy(self._sum_scores(data, name, rows, model))
            for name, rows in rows_of_set.items()
        }

    def _sum_scores(self, data: QuestionAnswerDataset, name: str, rows: list[int], model: Any) -> np.ndarray:
        """Answer questions of one set, and return the partial sums of its metric; of no questions they are 0."""
        info, groups = data.sets[name], data.groups[name]
        prompts = [tokens[:prompt_length].tolist() for tokens, prompt_length in map(data.row, rows)]
        # every set has sums in every batch, because fairseq adds up the logs of all processes by name
        answers = greedy_search(model, prompts, info.answer_tokens, self.cfg.tokens_per_sample) if prompts else []
        items, group_numbers = [], []
        for question, tokens in zip(map(data.question, rows), answers, strict=True):
            items.append(data.rows.with_prediction(question, data.rows.decode(tokens).strip()))
            group_numbers.append(groups[score_group(question)])
        return partial_sums(info.published, items, group_numbers, len(groups))

    def reduce_metrics(self, logging_outputs: Any, criterion: Any) -> None:
        """Log the values of the criterion and the scores of generated answers."""
        super().reduce_metrics(logging_outputs, criterion)
        for key in logging_outputs[0] if logging_outputs else ():
            if key.startswith(_SUMS_PREFIX):
                name = key.removeprefix(_SUMS_PREFIX)
                total = sum(log[key] for log in logging_outputs if key in log).cpu().numpy()
                make_meter = partial(_Score, self.prepared.sets[name].published)
                metrics.log_custom(make_meter, _SCORE_PREFIX + name, total, priority=15)
                metrics.log_derived("answers", _mean_score, priority=14)

    @property
    def source_dictionary(self) -> Dictionary:
        """Dictionary of the tokens."""
        return self._dictionary

    target_dictionary = source_dictionary
