"""What a sweep compares and what is on record of it: ``sweep.json``, written by the sweep and read by its reports."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.evaluation.question_records import By
from fairseq_rpe.evaluation.records import Context
from fairseq_rpe.questions.prompt import Cut
from fairseq_rpe.runs.run_folder import SWEEP_RECORD, RunFolder, Which
from fairseq_rpe.runs.settings import IDENTITY, Settings
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import RESTORE, read_json, write_json
from fairseq_rpe.utils.records import Betas, Count, Fraction, FromZero, Natural, Rate, Rule, Words

Kind = Literal["text", "algorithms", "answers"]
_LONGEST_NAME = 80
Url = Annotated[str, Rule(lambda text: text.startswith("https://"), "an address that begins with https://")]


def slug(spec: str, seed: int) -> str:
    """A file name for a run; two specs never share one."""
    plain = re.sub(r"[^A-Za-z0-9._=-]+", "-", spec)[:_LONGEST_NAME]
    if plain != spec:
        plain += "-" + hashlib.sha256(spec.encode()).hexdigest()[:6]
    return f"{plain}-seed{seed}"


@dataclass(frozen=True)
class Further:
    """What may be said of how a model is trained; of a training that continues another one ``None`` is: as that one."""

    tokens: Count | None = None
    batch_sentences: Count | None = None
    updates: Count | None = None
    lr: Rate | None = None
    warmup: Count | None = None
    schedule: Literal["inverse_sqrt", "linear", "cosine"] | None = None
    min_lr: FromZero | None = None
    betas: Betas | None = None
    weight_decay: FromZero | None = None
    clip_norm: FromZero | None = None
    dropout: Fraction | None = None
    attention_dropout: Fraction | None = None
    activation_dropout: Fraction | None = None

    def given(self) -> dict[str, object]:
        """What is said."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Method:
    """What a sweep compares: an encoding with its position transforms; ``name`` is its label everywhere.

    ``rpe_eval``: the encoding that evaluation has in place of ``rpe``, without any training.
    ``continues``: the method whose finished training it begins with, and ``further`` what its own does in
    another way.
    """

    name: str
    rpe: str
    positions_train: str = IDENTITY
    positions_eval: str | None = None
    rpe_eval: str | None = None
    continues: str | None = None
    further: Further = Further()

    @property
    def leaves_positions(self) -> bool:
        """Whether positions are the plain ones in training and in evaluation."""
        return {self.positions_train, self.positions_eval or IDENTITY} == {IDENTITY}

    def run_name(self, seed: int, algorithm: str | None = None) -> str:
        """The folder of a training run: methods that are trained alike share it; what continues another has its own."""
        if self.continues:
            return slug("@".join(part for part in (algorithm, self.name, f"after={self.continues}") if part), seed)
        moved = None if self.positions_train == IDENTITY else self.positions_train
        return slug("@".join(part for part in (algorithm, self.rpe, moved) if part), seed)

    def record(self) -> dict[str, object]:
        """As sweep.json has it, by its name."""
        left = {"name", "continues", "further"} | ({"rpe_eval"} if self.rpe_eval is None else set())
        known = {key: value for key, value in vars(self).items() if key not in left}
        return {**known, "continues": self.continues, "further": self.further.given()} if self.continues else known


@dataclass(frozen=True)
class Training(Further):
    """What a recipe's file may say of a training, its own or a published one; ``None``: it does not."""

    arch: str | None = None
    activation_fn: Literal["relu", "gelu", "gelu_accurate"] | None = None
    share_embeddings: bool | None = None


@dataclass(frozen=True)
class PublishedSettings(Training):
    """What is known of published runs; ``context``: whether a training sequence may hold more than one document."""

    data: str | None = None
    tokeniser: str | None = None
    model: str | None = None
    vocabulary: Count | None = None
    parameters: Count | None = None
    optimiser: str | None = None
    context: Context | None = None


@dataclass(frozen=True)
class Published:
    """Published results: where they are from, what is known of the runs, and the values by method.

    ``values``: by length for text (perplexities, or their natural logarithms where ``measure`` is ``log_ppl``), by
    task for algorithms (exact answers in per cent), by set or by length for answers to questions (``score``, a metric
    in per cent; ``mean``: what alone is printed of them).
    """

    source: str
    url: Url | None = None
    settings: PublishedSettings | None = None
    measure: Literal["ppl", "log_ppl", "score"] = "ppl"
    values: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)

    @property
    def form(self) -> str:
        """How to print the values: with as many decimals as the most precise of them, at least two."""
        given = [str(value) for row in self.values.values() for value in row.values()]
        return f".{max([2, *(len(text.partition('.')[2]) for text in given)])}f"

    def record(self) -> dict[str, object]:
        """As TOML and JSON have it: a method's values beside what is said about them."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("settings", "values")}
        found = {key: value for key, value in known.items() if value is not None and (key, value) != ("measure", "ppl")}
        if self.settings is not None:
            found["settings"] = {k: v for k, v in records.write(self.settings).items() if v is not None}
        return {**found, **self.values}


def read_published(given: object, source: str, methods: Mapping[str, Method] | None) -> Published:
    """Published results as TOML or JSON have them; ``methods`` are those that may have values, if that is checked."""
    if not isinstance(given, Mapping):
        raise UserError(f"{source}: published is not a table: {RESTORE}")
    about = {f.name for f in fields(Published)} - {"values"}
    values = {name: row for name, row in given.items() if name not in about}
    for name in values:
        if methods is not None and name not in methods:
            raise UserError(f"{source}: published has an unknown method '{name}'{nearest(name, methods)}")
    own = {name: value for name, value in given.items() if name in about}
    return records.read(Published, {**own, "values": values}, source, "published", strict=methods is not None)


@dataclass(frozen=True)
class SweepSettings(Settings):
    """What all runs of a sweep share; ``subset``: the split that is scored. What differs between them is ``None``."""

    updates: int | None = None
    subset: str = "test"

    def record(self) -> dict[str, object]:
        """As sweep.json has them."""
        own = ("rpe", "seed", "positions_train", "positions_eval", "data", "tokens")
        return {key: value for key, value in super().record().items() if value is not None or key not in own}


@dataclass(frozen=True)
class Scored:
    """A text that runs are evaluated on: its folder and digest."""

    data: str
    digest: str


@dataclass(frozen=True)
class Questions(Scored):
    """A prepared folder of questions that models are fine-tuned on and then asked, of its ``sets``."""

    sets: Words = ()


@dataclass(frozen=True)
class Asking:
    """How questions are answered.

    ``by``: freely written, or the likeliest of the choices; ``beam``: its width, 1 is greedy; ``cut``: where a document
    that is too long is shortened, in training too; ``checkpoint``: of the fine-tuning, the last or that of the best
    mean score in validation, where answers are then written too.
    """

    by: By = "generation"
    beam: Count = 1
    cut: Cut = "end"
    checkpoint: Which = "last"

    @property
    def options(self) -> dict[str, object]:
        """Those of ``fairseq-rpe answer``."""
        return {key: value for key, value in vars(self).items() if key != "checkpoint"}


@dataclass(frozen=True)
class State:
    """What is on record of a sweep. ``encodings`` are the names of its methods, in the order asked for.

    ``commands``: run -> stage -> command lines. ``algorithms``: its generated tasks; none for a sweep on text.
    ``evaluate``: by name, the other texts that its runs are evaluated on. ``questions``: by name, the folders that a
    sweep over questions fine-tunes on; ``settings`` are then of the training before, ``tuned`` of the fine-tuning.
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
    evaluate: Mapping[str, Scored] = field(default_factory=dict)
    questions: Mapping[str, Questions] = field(default_factory=dict)
    tuned: SweepSettings | None = None
    asking: Asking | None = None

    @property
    def kind(self) -> Kind:
        """What its runs do."""
        return "algorithms" if self.algorithms else "answers" if self.questions else "text"

    @property
    def tasks(self) -> tuple[str, ...]:
        """What each method is trained on one by one: generated tasks, or folders of questions; none on text."""
        return self.algorithms or tuple(self.questions)

    def method(self, name: str) -> Method:
        """What a label stands for; a plain encoding stands for itself."""
        return self.methods.get(name, Method(name, name))


class SweepFolder:
    """The ``--out`` folder of a sweep; ``lock`` is held while a sweep writes here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_path = path / SWEEP_RECORD
        self.lock = path / ".lock"
        self.tensorboard = path / "tensorboard"

    def run_of(self, method: Method, seed: int, algorithm: str | None = None) -> RunFolder:
        """The run that a method is evaluated with."""
        return RunFolder(self.path / "runs" / method.run_name(seed, algorithm))

    def state(self) -> State:
        """What is on record.

        Raises UserError: the folder is not one of a sweep, or its record is damaged.
        """
        if not self.state_path.is_file():
            raise UserError(f"{self.path} holds no {self.state_path.name}: name the --out folder of a sweep")
        given, source = read_json(self.state_path), str(self.state_path)
        published = given.pop("published", None)
        given["methods"] = named = given.get("methods") or {}
        if isinstance(named, dict):
            given["methods"] = {n: {"name": n, **m} if isinstance(m, dict) else m for n, m in named.items()}
        state = records.read(State, given, source, "the sweep", strict=False)
        return replace(state, published=read_published(published, source, None)) if published else state

    def write(self, state: State) -> None:
        """Put a sweep on record."""
        given = records.write(state)
        given["settings"] = state.settings.record()
        given["methods"] = {name: method.record() for name, method in state.methods.items()}
        given["published"] = state.published.record() if state.published else None
        given["tuned"] = state.tuned.record() if state.tuned else None
        some = ("data", "algorithms", "evaluate", "questions", "tuned", "asking")
        write_json(self.state_path, {k: v for k, v in given.items() if v or k not in some})
