"""Methods of a sweep and its record ``sweep.json``, written by the sweep and read by reports."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.evaluation.position_limits import method_limit
from fairseq_rpe.evaluation.question_records import AnswerMode
from fairseq_rpe.evaluation.records import Context
from fairseq_rpe.questions.prompt import Truncate
from fairseq_rpe.runs.run_folder import LAYOUT, SWEEP_RECORD, CheckpointKind, RunFolder, check_layout
from fairseq_rpe.runs.settings import RunSettings
from fairseq_rpe.runs.training_config import IDENTITY, ModelSettings, OptimizationSettings
from fairseq_rpe.utils import records
from fairseq_rpe.utils.json_files import RESTORE, read_json, write_json
from fairseq_rpe.utils.records import Count, Natural, Rule, TextTuple

_MAX_NAME_LENGTH = 80
Url = Annotated[str, Rule(lambda text: text.startswith("https://"), "an address that begins with https://")]


def slug(spec: str, seed: int) -> str:
    """Return a file name for a run; different specs get different names.

    Args:
        spec: spec of the encoding or method that is trained.
        seed: random seed of the training.

    Returns:
        The name, with a hash if the spec has characters that a file name should not have.
    """
    plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", spec)[:_MAX_NAME_LENGTH]
    if plain != spec:
        plain += "-" + hashlib.sha256(spec.encode()).hexdigest()[:6]
    return f"{plain}-seed{seed}"


@dataclass(frozen=True)
class Method:
    """A method that a sweep compares: an encoding with its position transforms.

    Attributes:
        name: label of the method in all tables and figures.
        rpe: spec of the encoding.
        positions_train, positions_eval: specs of the position transforms.
        rpe_eval: encoding that replaces ``rpe`` in evaluation, without training.
        continues: name of the method whose finished training this one starts from.
        further: settings of that continued training which differ from the first one.
    """

    name: str
    rpe: str
    positions_train: str = IDENTITY
    positions_eval: str | None = None
    rpe_eval: str | None = None
    continues: str | None = None
    further: OptimizationSettings = field(default_factory=OptimizationSettings)

    @property
    def evaluated_rpe(self) -> str:
        """Spec of the encoding in evaluation."""
        return self.rpe_eval or self.rpe

    def position_limit(self, train_length: int) -> int | None:
        """Return the largest sequence length in tokens for which the method has positions, or None without a limit."""
        return method_limit(self.evaluated_rpe, self.positions_eval, train_length)

    @property
    def leaves_positions(self) -> bool:
        """Whether no position transform is used, neither in training nor in evaluation."""
        return {self.positions_train, self.positions_eval or IDENTITY} == {IDENTITY}

    def run_name(self, seed: int, algorithm: str | None = None) -> str:
        """Return the name of a run's folder.

        Methods with the same training share a run; a method that continues another one has a run of its own.

        Args:
            seed: random seed of the training.
            algorithm: generated task or set of questions.

        Returns:
            The name of the folder.
        """
        if self.continues:
            return slug("@".join(word for word in (algorithm, self.name, f"after={self.continues}") if word), seed)
        transform = None if self.positions_train == IDENTITY else self.positions_train
        return slug("@".join(word for word in (algorithm, self.rpe, transform) if word), seed)

    def to_dict(self) -> dict[str, object]:
        """Return the method as in sweep.json, without its name."""
        omitted = {"name", "continues", "further"} | ({"rpe_eval"} if self.rpe_eval is None else set())
        method = {key: value for key, value in vars(self).items() if key not in omitted}
        return {**method, "continues": self.continues, "further": self.further.stated()} if self.continues else method


@dataclass(frozen=True)
class PublishedSettings(ModelSettings):
    """Settings of published runs, in the words of the paper; None if not published.

    Attributes:
        data: name of the training text.
        tokeniser: kind of the tokenizer.
        model: layers, heads and widths of the model.
        vocabulary: number of types.
        parameters: number of parameters.
        optimiser: name of the optimizer.
        context: whether a training sequence may hold more than one document.
    """

    data: str | None = None
    tokeniser: str | None = None
    model: str | None = None
    vocabulary: Count | None = None
    parameters: Count | None = None
    optimiser: str | None = None
    context: Context | None = None


@dataclass(frozen=True)
class Published:
    """Published results of a recipe.

    Attributes:
        source: paper, and table or figure in it.
        url: web address of the source.
        settings: settings of the published runs.
        measure: ``ppl``, ``log_ppl`` (natural logarithm) or ``score`` (a metric in per cent).
        values: results by method, then by length for text; by task for algorithms (exact match in per cent); by set or
            length for questions, or ``mean`` if only the mean is published.
    """

    source: str
    url: Url | None = None
    settings: PublishedSettings | None = None
    measure: Literal["ppl", "log_ppl", "score"] = "ppl"
    values: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)

    @property
    def number_format(self) -> str:
        """Format specification with the decimals of the most precise value, at least two."""
        numbers = [str(value) for row in self.values.values() for value in row.values()]
        return f".{max([2, *(len(text.partition('.')[2]) for text in numbers)])}f"

    def to_dict(self) -> dict[str, object]:
        """Return the results as in TOML and JSON: values by method next to the other keys."""
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("settings", "values")}
        record = {
            key: value for key, value in about.items() if value is not None and (key, value) != ("measure", "ppl")
        }
        if self.settings is not None:
            record["settings"] = {k: v for k, v in records.to_dict(self.settings).items() if v is not None}
        return {**record, **self.values}


def read_published(table: object, source: str, methods: Mapping[str, Method] | None) -> Published:
    """Read published results from a table of TOML or JSON.

    Args:
        table: contents of ``published``, as the file has it.
        source: file, for messages.
        methods: methods that may have values; None skips this check.

    Returns:
        The results.

    Raises:
        UserError: the table is not valid, or has values of an unknown method.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"{source}: published is not a table: {RESTORE}")
    about = {f.name for f in fields(Published)} - {"values"}
    values = {name: row for name, row in table.items() if name not in about}
    for name in values:
        if methods is not None and name not in methods:
            raise UserError(f"{source}: published has an unknown method '{name}'{did_you_mean(name, methods)}")
    described = {name: value for name, value in table.items() if name in about}
    return records.read_record(
        Published, {**described, "values": values}, source, "published", strict=methods is not None
    )


@dataclass(frozen=True)
class SweepSettings(RunSettings):
    """Settings that all runs of a sweep share; settings that differ between runs are ``None``.

    Attributes:
        updates: number of updates of each training.
        split: split that results are computed on.
    """

    updates: int | None = None
    split: str = "test"

    def to_dict(self) -> dict[str, object]:
        """Return the settings as in sweep.json."""
        optional = ("rpe", "seed", "positions_train", "positions_eval", "data", "tokens")
        settings = {**super().to_dict(), "updates": self.updates, "split": self.split}
        return {key: value for key, value in settings.items() if value is not None or key not in optional}


@dataclass(frozen=True)
class EvaluationText:
    """A text or question folder that runs are evaluated on.

    Attributes:
        data: path of the prepared folder.
        digest: digest of the contents, so that the folder may be moved.
    """

    data: str
    digest: str


@dataclass(frozen=True)
class EvaluationQuestions(EvaluationText):
    """A folder of questions that models are fine-tuned and evaluated on.

    Attributes:
        sets: sets of the folder that are evaluated.
    """

    sets: TextTuple = ()


@dataclass(frozen=True)
class QuestionConfig:
    """How questions are answered.

    Attributes:
        answer_mode: generate the answer, or choose the most likely choice.
        beam: width of the beam search; 1 is greedy.
        truncate: side at which a document that is too long is truncated, in training as well.
        checkpoint: checkpoint of the fine-tuning that answers: the last, or the one with the best mean score in
            validation, which then generates answers.
    """

    answer_mode: AnswerMode = "generation"
    beam: Count = 1
    truncate: Truncate = "end"
    checkpoint: CheckpointKind = "last"

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of ``fairseq-rpe eval-questions``, by field."""
        return {key: value for key, value in vars(self).items() if key != "checkpoint"}


@dataclass(frozen=True)
class SweepRecord:
    """Contents of sweep.json.

    Attributes:
        settings: settings of the trainings; in a sweep over questions those of the pre-training.
        encodings: names of the methods, in the order of the command line.
        seeds: seeds with which each method is trained.
        lengths: lengths of the evaluation, in tokens or items.
        methods: methods by name, with their specs and position transforms.
        recipe: name of the recipe on the command line, None without one.
        title, paper, published: the recipe's title, paper and published results.
        commands: command lines by run and stage.
        data: path of the text of the training, None for generated tasks.
        algorithms: generated tasks; empty for a sweep on text.
        evaluate: further texts of the evaluation, by name.
        questions: folders that a sweep over questions fine-tunes and evaluates on, by name.
        fine_tuning: settings of the fine-tuning.
        question_config: how questions are answered.
        evaluate_at: numbers of updates after which the models are evaluated, besides the end of the training.
    """

    settings: SweepSettings
    encodings: tuple[str, ...]
    seeds: tuple[Natural, ...]
    lengths: tuple[Count, ...] = ()
    methods: Mapping[str, Method] = field(default_factory=dict)
    recipe: str | None = None
    title: str | None = None
    paper: str | None = None
    published: Published | None = None
    commands: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    data: str | None = None
    algorithms: tuple[str, ...] = ()
    evaluate: Mapping[str, EvaluationText] = field(default_factory=dict)
    questions: Mapping[str, EvaluationQuestions] = field(default_factory=dict)
    fine_tuning: SweepSettings | None = None
    question_config: QuestionConfig | None = None
    evaluate_at: tuple[Count, ...] = ()

    @property
    def kind(self) -> str:
        """Name of the kind of sweep; see :func:`~fairseq_rpe.sweeps.sweep_kind.sweep_kind`."""
        return "algorithms" if self.algorithms else "answers" if self.questions else "text"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Generated tasks or folders of questions with a run of each method; empty for a sweep on text."""
        return self.algorithms or tuple(self.questions)

    def method(self, name: str) -> Method:
        """Return the method of a name; the name of a plain encoding is its spec."""
        return self.methods.get(name, Method(name, name))


class SweepFolder:
    """The ``--out`` folder of a sweep.

    A sweep holds a lock on ``lock`` while it writes here.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record_path = path / SWEEP_RECORD
        self.lock = path / ".lock"
        self.tensorboard = path / "tensorboard"

    def run_folder(self, method: Method, seed: int, algorithm: str | None = None) -> RunFolder:
        """Return the folder of the run that evaluates a method."""
        return RunFolder(self.path / "runs" / method.run_name(seed, algorithm))

    def read_record(self) -> SweepRecord:
        """Read sweep.json.

        Raises:
            UserError: the folder is not that of a sweep, or its record is damaged or has another layout.
        """
        path = self.record_path
        if not path.is_file():
            raise UserError(f"{self.path} holds no {path.name}: name the --out folder of a sweep")
        table = read_json(path)
        check_layout(table, path, "sweep")
        published = table.pop("published", None)
        table["methods"] = methods = table.get("methods") or {}
        if isinstance(methods, dict):
            table["methods"] = {n: {"name": n, **m} if isinstance(m, dict) else m for n, m in methods.items()}
        record = records.read_record(SweepRecord, table, str(path), "the sweep", strict=False)
        return replace(record, published=read_published(published, str(path), None)) if published else record

    def write_record(self, record: SweepRecord) -> None:
        """Write sweep.json.

        Args:
            record: contents of sweep.json, of which the layout is added here.
        """
        table = {"layout": LAYOUT, **records.to_dict(record)}
        table["settings"] = record.settings.to_dict()
        table["methods"] = {name: method.to_dict() for name, method in record.methods.items()}
        table["published"] = record.published.to_dict() if record.published else None
        table["fine_tuning"] = record.fine_tuning.to_dict() if record.fine_tuning else None
        optional = ("data", "algorithms", "evaluate", "questions", "fine_tuning", "question_config", "evaluate_at")
        write_json(self.record_path, {k: v for k, v in table.items() if v or k not in optional})
