"""Recipes (``fairseq_rpe/recipes/*.toml``): published experiments with their methods, data and size presets."""

import difflib
import importlib
import itertools
import os
import re
import reprlib
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.renamed import RECIPE_KEYS
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.data import folder
from fairseq_rpe.data.prepare_options import CORPORA
from fairseq_rpe.questions import benchmarks
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.training_config import OptimizationSettings, TrainingConfig, TrainingSettings
from fairseq_rpe.sweeps.sweep_record import Method, Published, QuestionConfig, read_published
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import PACKAGE_DIR
from fairseq_rpe.utils.records import Count, Counts, Rule, TextTuple


@cache
def kind_names() -> tuple[str, ...]:
    """Return the names of all kinds of sweeps, those of the modules of :mod:`fairseq_rpe.kinds`."""
    folder = PACKAGE_DIR / "kinds"
    return tuple(sorted(path.stem for path in folder.glob("[a-z]*.py")))


KindName = Annotated[str, Rule(lambda name: name in kind_names(), " or ".join(kind_names()))]
DifferentTexts = Annotated[TextTuple, Rule(lambda v: len(v) == len(set(v)) > 0, "a list of different texts")]
FOLDER = PACKAGE_DIR / "recipes"
# in a method's specs: the training length of the preset, or a multiple of it
_LENGTH = re.compile(r"\$tokens(?:\*(\d+))?")
_MAX_SUGGESTIONS = 8
_QUESTION_COMMANDS = ("prepare-questions", "prepare-cloze")
_QUESTION_KEYS = ("pretrained", "questions", "tuning", "question_config")  # of presets of kind "answers"
_SPECS = ("rpe", "rpe_eval", "positions_train", "positions_eval")
_CONFIG_KEYS = [f.name for f in fields(TrainingSettings)]
# flags of fairseq-train that keep the checkpoint with the best score in validation
_KEEP_BEST = ["--eval-answers", "--best-checkpoint-metric", "answers", "--maximize-best-checkpoint-metric"]


def batch_per_process(batch: int, config: TrainingConfig) -> int:
    """Divide the batch of an update among processes and accumulated batches.

    Args:
        batch: number of sequences of an update, over all processes and accumulated batches.
        config: configuration of the training.

    Returns:
        Sequences of one process and accumulated batch.

    Raises:
        UserError: the batch is not divisible.
    """
    freq = config.update_freq
    divisor = config.world_size * (freq or 1)
    if batch % divisor:
        each = f" of {freq} batches each" if freq and freq > 1 else ""
        raise UserError(
            f"the recipe's {batch} sequences per update cannot be divided among {config.world_size} processes{each}: "
            "choose --nproc, --nodes and --update-freq that divide them, or --batch-sentences"
        )
    return batch // divisor


@dataclass(frozen=True)
class FineTuningConfig(OptimizationSettings):
    """How pre-trained models are fine-tuned on questions; ``None`` is the value of the pre-training.

    Attributes:
        mixture: weights of the sets of a folder.
        max_tokens: largest batch in tokens, padding included; a batch then has at most ``batch_sentences`` questions.
    """

    mixture: str | None = None
    max_tokens: Count | None = None

    def flags(self, question_config: QuestionConfig) -> list[str]:
        """Return the flags of fairseq-train's task ``rpe_answers``.

        Args:
            question_config: how questions are answered after the fine-tuning.

        Returns:
            Flags and values.
        """
        truncate = question_config.truncate
        options = {
            "--truncate": truncate if truncate != QuestionConfig().truncate else None,
            "--mixture": self.mixture,
            "--max-tokens": None if self.max_tokens is None else str(self.max_tokens),
        }
        flags = [word for flag, value in options.items() if value is not None for word in (flag, value)]
        return [*flags, *(_KEEP_BEST if question_config.checkpoint == "best" else [])]


@dataclass(frozen=True)
class QuestionFolder:
    """A prepared folder of questions.

    Attributes:
        data: path of the prepared folder; it need not exist.
        prepare: words after ``fairseq-rpe`` that prepare it.
        sets: sets of the folder that are evaluated; empty for all.
    """

    data: str
    prepare: TextTuple = ()
    sets: TextTuple = ()


@dataclass(frozen=True)
class Preset(TrainingSettings):
    """Sizes and settings of a recipe; options of ``sweep`` override them.

    A recipe of kind "answers" pre-trains on ``data``, fine-tunes on each of ``questions``, and evaluates the answers.

    Attributes:
        batch_sentences: sequences of an update, over all processes and accumulated batches.
        data: path of the folder with the text of the training.
        corpus: corpus that ``data`` is prepared from.
        tokenizer: tokenizer of the corpus, None for the default.
        vocabulary: types of the dictionary that ``data`` must have.
        algorithms: specs of generated tasks.
        methods: methods that are compared by default, None for all.
        seeds: seeds with which each method is trained by default.
        lengths: lengths of the evaluation, in tokens or items.
        evaluate_at: numbers of updates after which the models are evaluated, too.
        evaluate: folders of further texts to evaluate on, by name.
        further: settings of continued trainings by method; they replace those of the method.
        pretrained: folder of another sweep whose finished pre-trainings are reused.
        questions: folders of questions, by name.
        tuning: settings of the fine-tuning.
        question_config: how questions are answered.
        extra: further flags for fairseq-train.
    """

    data: str | None = None
    corpus: str | None = None
    tokenizer: Literal["bpe", "gpt2", "words"] | None = None
    vocabulary: Count | None = None
    algorithms: DifferentTexts | None = None
    methods: DifferentTexts | None = None
    lengths: Counts | None = None
    seeds: Counts | None = None
    evaluate_at: Counts | None = None
    evaluate: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, OptimizationSettings] = field(default_factory=dict)
    pretrained: str | None = None
    questions: Mapping[str, QuestionFolder] = field(default_factory=dict)
    tuning: FineTuningConfig | None = None
    question_config: QuestionConfig | None = None
    extra: TextTuple = ()

    def question_keys(self) -> list[str]:
        """Return the names of the stated settings about questions."""
        return [key for key in _QUESTION_KEYS if getattr(self, key)]

    def question_folders(self, eval_data: Mapping[str, Path]) -> dict[str, QuestionFolder]:
        """Return the folders of ``--eval-data`` or else those of the preset.

        A name that the preset has, too, keeps the preset's command of preparation and its choice of sets.
        """
        folders = {name: self.questions.get(name, QuestionFolder("")) for name in eval_data}
        replaced = {name: replace(folder, data=str(eval_data[name])) for name, folder in folders.items()}
        return replaced or dict(self.questions)

    def fill_config(self, config: TrainingConfig) -> TrainingConfig:
        """Fill the open settings of a configuration with those of the preset.

        Args:
            config: options of the command line.

        Returns:
            The configuration; further flags of the preset come before its own.

        Raises:
            UserError: the batch cannot be divided among the processes and accumulated batches.
        """
        settings = {name: getattr(self, name) for name in _CONFIG_KEYS if getattr(config, name) is None}
        freq = config.update_freq or self.update_freq
        if (config.schedule or self.schedule) != "cosine":
            settings.pop("min_lr", None)
        filled = replace(config, **settings, extra=(*self.extra, *config.extra))
        if config.batch_sentences is not None or config.world_size * (freq or 1) == 1:
            return filled
        defaults = defaults_for(filled.arch or "tiny", self.algorithms is not None)
        batch = self.batch_sentences or defaults.batch_sentences
        return replace(filled, batch_sentences=batch_per_process(batch, filled))

    def resolve_method(self, method: Method, tokens: int) -> Method:
        """Replace ``$tokens`` in a method's specs and apply ``further``.

        Args:
            method: method as the recipe has it.
            tokens: training length in tokens.

        Returns:
            The method of this preset.
        """

        def multiply(match: re.Match[str]) -> str:
            return str(tokens * int(match[1] or 1))

        specs = {name: _LENGTH.sub(multiply, spec) for name in _SPECS if (spec := getattr(method, name)) is not None}
        return replace(method, **specs, further=self.further.get(method.name, method.further))

    def preparation(self, data: Path) -> tuple[str, ...]:
        """Return the words after ``fairseq-rpe`` that prepare ``data``; empty without a corpus."""
        return () if self.corpus is None else ("prepare-corpus", self.corpus, *self._prepare_options(data))

    def _prepare_options(self, data: Path) -> list[str]:
        words = ["--out", str(data), *(["--tokenizer", self.tokenizer] if self.tokenizer else [])]
        return words + (["--vocab-size", str(self.vocabulary)] if self.tokenizer == "bpe" and self.vocabulary else [])

    def check(self, data: Path) -> None:
        """Check that a prepared folder has the vocabulary of this preset.

        Args:
            data: prepared folder with ``dict.txt``.

        Raises:
            UserError: it has another vocabulary.
        """
        if self.vocabulary is None:
            return
        symbols = len(folder.read_dictionary(data / "dict.txt"))
        kind = folder.read_manifest(data).get("tokenizer", {}).get("kind")
        if symbols == self.vocabulary and kind in (None, self.tokenizer or kind):
            return
        other = Path(self.data or data)
        if other == data:
            other = Path(f"{data}-{self.tokenizer or self.vocabulary}")
        command = self.preparation(other) or ("prepare", "SOURCE", *self._prepare_options(other))
        actual, expected = (f" of {name}" if name else "" for name in (kind, self.tokenizer))
        raise UserError(
            f"{data} has a vocabulary of {symbols:,} types{actual}, "
            f"this recipe trains on {self.vocabulary:,}{expected}: "
            f"prepare another folder, e.g. fairseq-rpe {shlex.join(command)}"
        )


class RecipeKind:
    """What a kind of sweep states about the recipes and options of its sweeps.

    Each kind is a module of :mod:`fairseq_rpe.kinds`, whose ``KIND`` is an instance of a subclass of
    :class:`~fairseq_rpe.sweeps.sweep_kind.SweepKind`.

    Attributes:
        name: name in recipes.
        default_split: split that results are computed on by default.
        generates_data: whether the trainings generate their data, so that a sweep takes ``--algorithms`` and no DATA.
    """

    name: ClassVar[str]
    default_split: ClassVar[str] = "test"
    generates_data: ClassVar[bool] = False

    def select_presets(self, presets: dict[str, Preset], source: str) -> dict[str, Preset]:
        """Check the presets of a recipe of this kind.

        Args:
            presets: presets by name, with those of the recipe's base.
            source: the recipe, for messages.

        Returns:
            The presets that belong to this kind.

        Raises:
            UserError: a preset has settings of another kind.
        """
        for label, preset in presets.items():
            if keys := preset.question_keys():
                raise UserError(
                    f"{source}: {keys[0]} of preset '{label}' is for kind answers, this recipe is for {self.name}"
                )
        return presets


def recipe_kind(name: str) -> RecipeKind:
    """Return the kind of sweeps with a name, one of :func:`kind_names`."""
    kind: RecipeKind = importlib.import_module(f"fairseq_rpe.kinds.{name}").KIND
    return kind


@dataclass(frozen=True)
class Recipe:
    """One published experiment.

    Attributes:
        name: name of the recipe, which names the default output folder.
        title: title of reports about the recipe.
        paper: paper, and table or figure in it, that the recipe follows.
        kind: what the runs are evaluated on.
        methods: methods to compare, in the order of the tables.
        presets: model sizes and training settings, by name.
        published: results of the paper, None without any.
    """

    name: str
    title: str
    paper: str
    kind: KindName
    methods: tuple[Method, ...]
    presets: Mapping[str, Preset]
    published: Published | None = None

    def preset(self, name: str) -> Preset:
        """Return the preset of a name.

        Raises:
            UserError: the recipe has no preset of that name.
        """
        if name not in self.presets:
            near = did_you_mean(name, self.presets)
            raise UserError(f"recipe '{self.name}' has no preset '{name}'{near}; it has: {', '.join(self.presets)}")
        return self.presets[name]

    def select_methods(self, names: tuple[str, ...]) -> list[Method]:
        """Return the methods with these names.

        Args:
            names: names of methods, or ``("all",)``.

        Returns:
            The methods in the order of ``names``.

        Raises:
            UserError: a name is unknown or repeated.
        """
        methods = {method.name: method for method in self.methods}
        if names == ("all",):
            return list(methods.values())
        for name in names:
            if name not in methods:
                raise UserError(
                    f"recipe '{self.name}' has no method '{name}'{did_you_mean(name, methods)}; "
                    f"it has: {', '.join(methods)}, or all"
                )
        if len(set(names)) < len(names):
            raise UserError("--methods names one twice: leave one out")
        return [methods[name] for name in names]


@dataclass(frozen=True)
class _RecipeFile:
    """Tables of a recipe's file; methods and presets are read one by one, so that messages name them."""

    title: str
    paper: str
    kind: KindName
    methods: dict[str, object]
    presets: dict[str, object]
    published: dict[str, object] | None = None


def names() -> list[str]:
    """Return the names of the recipes of the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Recipe:
    """Load a recipe.

    A recipe with ``base = "NAME"`` (or a file next to it) is that recipe with its own keys in place of the base's;
    ``NAME = false`` under ``[presets]`` removes a preset of the base.

    Args:
        name: name of a recipe of the package, or path of a TOML file.

    Returns:
        The recipe.

    Raises:
        UserError: there is no such recipe, or it is not valid.
    """
    path, table = _read(name)
    source = f"recipe {path}"
    text = records.read_record(_RecipeFile, table, source, "the recipe")
    methods = {}
    for label, method in text.methods.items():
        if not label or any(separator in label for separator in " \t,"):
            raise UserError(f"{source}: method '{label}' has no name or a blank or comma in it")
        named = {**method, "name": label} if isinstance(method, dict) else method
        methods[label] = records.read_record(Method, named, source, f"method '{label}'")
    # ``false`` in place of a table removes a preset of the base
    tables = {label: preset for label, preset in text.presets.items() if preset is not False}
    presets = {
        label: records.read_record(Preset, preset, source, f"preset '{label}'") for label, preset in tables.items()
    }
    if not methods or not presets:
        raise UserError(f"{source} needs at least one method and one preset")
    _check_continued(methods, presets, source)
    _check_prepared(presets, source)
    presets = recipe_kind(text.kind).select_presets(presets, source)
    published = read_published(text.published, source, methods) if text.published else None
    return Recipe(path.stem, text.title, text.paper, text.kind, tuple(methods.values()), presets, published)


def _check_continued(methods: Mapping[str, Method], presets: Mapping[str, Preset], source: str) -> None:
    """Check that methods continue a method that is trained from scratch, and that only these have ``further``."""
    for method in methods.values():
        if method.continues is not None and method.continues not in methods:
            near = did_you_mean(method.continues, methods)
            raise UserError(f"{source}: method '{method.name}' continues an unknown method '{method.continues}'{near}")
        if method.continues is not None and methods[method.continues].continues is not None:
            raise UserError(
                f"{source}: method '{method.name}' continues '{method.continues}', which continues another one: name "
                "one that is trained from the start"
            )
        if method.further.stated() and method.continues is None:
            raise UserError(f"{source}: method '{method.name}' has further training of nothing: say what it continues")
    for label, preset in presets.items():
        for name in preset.further:
            if name not in methods or methods[name].continues is None:
                raise UserError(f"{source}: further of preset '{label}' names '{name}', which continues no method")


def _check_prepared(presets: Mapping[str, Preset], source: str) -> None:
    """Check that the corpora and the sets of questions of every preset can be prepared."""
    for label, preset in presets.items():
        if preset.corpus is not None and preset.corpus not in CORPORA:
            near = did_you_mean(preset.corpus, CORPORA)
            raise UserError(
                f"{source}: preset '{label}' names an unknown corpus '{preset.corpus}'{near}; "
                f"known: {', '.join(CORPORA)}"
            )
        for name, questions in preset.questions.items():
            command, *words = questions.prepare or ("prepare-questions",)
            if command not in _QUESTION_COMMANDS:
                raise UserError(
                    f"{source}: questions '{name}' of preset '{label}' are prepared by '{command}'"
                    f"{did_you_mean(command, _QUESTION_COMMANDS)}: name {' or '.join(_QUESTION_COMMANDS)}"
                )
            benchmark_names = benchmarks.benchmark_names()
            sets = itertools.takewhile(lambda word: not word.startswith("-"), words)
            for benchmark in sets if command == "prepare-questions" else ():
                if benchmark not in benchmark_names:
                    raise UserError(
                        f"{source}: questions '{name}' of preset '{label}' are of an unknown set '{benchmark}'"
                        f"{did_you_mean(benchmark, benchmark_names)}; known: {', '.join(benchmark_names)}"
                    )


def _suggestions(name: str) -> str:
    """List as many recipes as fit into a line, the most similar names first."""
    similar = difflib.get_close_matches(name, names(), n=_MAX_SUGGESTIONS, cutoff=0.5)
    recipes = list(dict.fromkeys([*similar, *names()]))
    more = f" … ({len(recipes)} in all: fairseq-rpe sweep --help)" if len(recipes) > _MAX_SUGGESTIONS else ""
    return ", ".join(recipes[:_MAX_SUGGESTIONS]) + more


def _read(name: str) -> tuple[Path, dict[str, object]]:
    """Return the file of a recipe, and its contents merged with those of its base, the base's base, and so on."""
    first, texts, seen = _path(name), list[dict[str, object]](), set[Path]()
    path: Path | None = first
    while path is not None:
        if (resolved := path.resolve()) in seen:
            raise UserError(f"recipe {path} is its own base: drop one of the base lines")
        seen.add(resolved)
        text = _read_toml(path)
        base = text.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UserError(f"recipe {path}: base must be the name of a recipe, not {reprlib.repr(base)}")
        texts.append(text)
        path = None if base is None else _path(str(path.parent / base) if base.endswith(".toml") else base)
    merged: dict[str, object] = {}
    try:
        for text in reversed(texts):
            merged = _merge(merged, text)
            if "published" in text:  # results belong to one experiment and are replaced as a whole
                merged["published"] = text["published"]
    except RecursionError:
        raise UserError(f"recipe {first} is nested too deep: write it flatter") from None
    return first, merged


def _path(name: str) -> Path:
    """Return the file of a recipe. Raises UserError: there is none."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.is_file():
        return path
    if name.endswith(".toml"):
        raise UserError(f"--recipe {name} {'is not a file' if os.path.lexists(path) else 'does not exist'}")
    raise UserError(f"unknown recipe '{name}'{did_you_mean(name, names())}; known: {_suggestions(name)}, or FILE.toml")


def _read_toml(path: Path) -> dict[str, object]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"recipe {path} is not TOML: {error}") from None
    for where, key in _renamed_keys(table):
        raise UserError(f"recipe {path}: {where} has the old key '{key}': write '{RECIPE_KEYS[key]}'")
    return table


def _renamed_keys(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the place and name of each key that has a new name."""
    if "scales" in table:
        yield "the recipe", "scales"
    presets = table.get("presets")
    for label, preset in presets.items() if isinstance(presets, dict) else ():
        if not isinstance(preset, dict):
            continue
        if "asking" in preset:
            yield f"preset '{label}'", "asking"
        config = preset.get("question_config")
        for key in ("by", "cut"):
            if isinstance(config, dict) and key in config:
                yield f"question_config of preset '{label}'", key


def _merge(base: dict[str, object], table: dict[str, object]) -> dict[str, object]:
    """Return ``base`` with the keys of ``table`` in place of its own, nested tables key by key."""
    merged = dict(base)
    for key, value in table.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
