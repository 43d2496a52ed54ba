"""Resolves the command line and an optional recipe into a :class:`Sweep`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairseq_rpe.algorithms import SPLITS, build, normalise
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.prepare_options import CORPORA
from fairseq_rpe.runs.settings import IDENTITY, TrainingRequest
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Preset, QuestionFolder, Recipe
from fairseq_rpe.sweeps.sweep_record import Method

_DEFAULT_PRESET = "laptop"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Sweep:
    """A resolved sweep.

    Attributes:
        out: folder of the sweep.
        methods: methods that are compared.
        data: text of the training, None for generated tasks.
        algorithms: generated tasks.
        lengths: lengths of the evaluation in tokens, or in items of the tasks (empty for all); with ``questions``
            lengths of the context.
        seeds: seeds of each method.
        split: split that is scored.
        max_tokens: largest batch of the evaluation in tokens.
        jobs: concurrent runs.
        base_request: options that all trainings share.
        recipe_name: name of the recipe on the command line.
        recipe: the recipe.
        preset: the preset of the recipe.
        preparation: words after ``fairseq-rpe`` that prepare ``data``; empty if the folder is the user's.
        prerequisites: methods that others continue and that are not compared themselves.
        evaluate: further texts of the evaluation, by name.
        prepared: names of the texts in ``evaluate`` that ``prepare-corpus`` makes.
        questions: folders to fine-tune and evaluate on, by name.
    """

    out: Path
    methods: tuple[Method, ...]
    data: Path | None
    algorithms: tuple[str, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    split: str
    max_tokens: int | None
    jobs: int | None
    base_request: TrainingRequest
    recipe_name: str | None
    recipe: Recipe | None
    preset: Preset | None = None
    preparation: tuple[str, ...] = ()
    prerequisites: tuple[Method, ...] = ()
    evaluate: Mapping[str, Path] = field(default_factory=dict)
    prepared: frozenset[str] = frozenset()
    questions: Mapping[str, QuestionFolder] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[Method, ...]:
        """All methods that are trained; methods that continue others come last."""
        return tuple(sorted((*self.prerequisites, *self.methods), key=lambda method: method.continues is not None))

    def preparation_of_text(self, name: str) -> tuple[str, ...]:
        """Return the words after ``fairseq-rpe`` that prepare a text with the vocabulary of the training."""
        command = ("prepare-corpus", name) if name in CORPORA else ("prepare", "SOURCE")
        return (*command, "--out", str(self.evaluate[name]), "--vocab-from", str(self.data))

    def preparation_of_questions(self, name: str) -> tuple[str, ...]:
        """Return the words after ``fairseq-rpe`` that prepare questions with the vocabulary of the training."""
        folder = self.questions[name]
        return (
            *(folder.prepare or ("prepare-questions", "NAME")),
            "--out",
            folder.data,
            "--vocab-from",
            str(self.data),
        )


def build_sweep(
    base: TrainingRequest,
    *,
    data: Path | None,
    algorithms: tuple[str, ...] | None,
    encodings: tuple[str, ...] | None,
    recipe: str | None,
    preset: str | None,
    methods: tuple[str, ...] | None,
    lengths: tuple[int, ...] | None,
    out: Path | None,
    split: str | None,
    max_tokens: int | None,
    seeds: tuple[int, ...] | None,
    jobs: int | None,
    eval_data: Sequence[tuple[str, Path]] = (),
) -> Sweep:
    """Resolve the options of ``fairseq-rpe sweep``; a recipe fills those that are ``None``.

    Args:
        base: options of every training, except encoding, seed, task and folders; the positions are for ``encodings``.
        data: text of the training.
        algorithms: generated tasks, in place of ``data``.
        encodings: specs to compare.
        recipe: name or file of a recipe, in place of ``encodings``.
        preset: preset of the recipe.
        methods: methods of the recipe.
        lengths: lengths of the evaluation.
        out: folder of the sweep.
        split: split that is scored.
        max_tokens: largest batch of the evaluation in tokens.
        seeds: seeds of each method.
        jobs: concurrent runs.
        eval_data: names and folders of further texts, or of questions.

    Returns:
        The sweep.

    Raises:
        UserError: an option is missing, or options contradict each other.
    """
    if (recipe is None) == (encodings is None):
        raise UserError('name what to compare: either --encodings "SPEC SPEC ..." or --recipe NAME')
    loaded = settings = None
    preparation: tuple[str, ...] = ()
    prerequisites: list[Method] = []
    evaluate, questions = _by_name(eval_data), dict[str, QuestionFolder]()
    if recipe is not None:
        if base.positions_train or base.positions_eval:
            raise UserError("--positions-train and --positions-eval do not go with --recipe: its methods name them")
        loaded = recipes.load(recipe)
        preset = preset or _DEFAULT_PRESET
        settings = loaded.preset(preset)
        compared = loaded.select_methods(methods if methods is not None else settings.methods or ("all",))
        if loaded.kind != "algorithms" and algorithms is not None:
            raise UserError(f"recipe '{loaded.name}' compares on text: drop --algorithms")
        if loaded.kind == "algorithms" and data is not None:
            raise UserError(f"recipe '{loaded.name}' generates its data: drop {data}")
        algorithms = settings.algorithms if algorithms is None else algorithms
        if data is None and settings.data is not None:
            data = Path(settings.data)
            preparation = settings.preparation(data)
        elif data is not None and not data.is_dir():
            preparation = settings.preparation(data)
        lengths, seeds = lengths or settings.lengths, seeds or settings.seeds
        out = out or Path("runs") / f"{loaded.name}-{preset}"
        base = settings.fill_request(base)
        if loaded.kind == "answers":
            questions, evaluate = _questions(settings, evaluate), {}
            lengths = lengths or ((settings.tuning and settings.tuning.tokens) or base.tokens or base.defaults.tokens,)
            if max_tokens is not None:
                raise UserError(f"recipe '{loaded.name}' asks questions: drop --max-tokens, which is about perplexity")
        evaluate = {**{name: Path(path) for name, path in settings.evaluate.items()}, **evaluate}
        _check_names({**evaluate, **questions})
        tokens = base.tokens or base.defaults.tokens
        continued = {method.continues for method in compared} - {method.name for method in compared}
        prerequisites = [settings.resolve_method(m, tokens) for m in loaded.methods if m.name in continued]
        compared = [settings.resolve_method(method, tokens) for method in compared]
    elif methods is not None:
        raise UserError("--methods belongs to --recipe: list encodings with --encodings")
    elif preset is not None:
        raise UserError(f"--preset {preset} belongs to a recipe: drop it, or name the recipe with --recipe")
    else:
        transforms = (base.positions_train or IDENTITY, base.positions_eval)
        compared = [Method(spec, spec, *transforms) for spec in encodings or ()]
    if not compared:
        raise UserError('--encodings is empty: name at least one, e.g. --encodings "alibi type1"')
    if len({m.name for m in compared}) < len(compared):
        raise UserError("--encodings names one twice: leave one out")
    split = split or ("valid" if questions else "test")
    if (data is None) == (algorithms is None):
        raise UserError('name what to train on: either a DATA folder or --algorithms "SPEC ..."')
    if lengths is None and algorithms is None:
        raise UserError("--lengths is missing: name the lengths to evaluate in tokens, e.g. 512,1024")
    if evaluate and algorithms is not None:
        raise UserError("--eval-data is for text: drop it, a generated task is evaluated on itself")
    tasks = () if algorithms is None else _tasks(algorithms, split, max_tokens)
    if out is None:
        raise UserError("--out is missing: name the folder of the sweep")
    return Sweep(
        out=out,
        methods=tuple(compared),
        data=data,
        algorithms=tasks,
        lengths=lengths or (),
        seeds=seeds or (1,),
        split=split,
        max_tokens=max_tokens,
        jobs=jobs,
        base_request=replace(base, positions_train=None, positions_eval=None, log_format="json"),
        recipe_name=recipe,
        recipe=loaded,
        preset=settings,
        preparation=preparation,
        prerequisites=tuple(prerequisites),
        evaluate=evaluate,
        prepared=frozenset(name for name, path in evaluate.items() if _is_prepared(settings, name, path)),
        questions=questions,
    )


def _by_name(eval_data: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    if len({name for name, _ in eval_data}) < len(eval_data):
        raise UserError("--eval-data gives one name twice: leave one out")
    _check_names(paths := dict(eval_data))
    return paths


def _questions(preset: Preset, eval_data: Mapping[str, Path]) -> dict[str, QuestionFolder]:
    """Return the folders of ``--eval-data``, else those of the preset, which may say how to prepare a name."""
    if not eval_data:
        return dict(preset.questions)
    folders = {name: preset.questions.get(name, QuestionFolder("")) for name in eval_data}
    return {name: replace(folder, data=str(eval_data[name])) for name, folder in folders.items()}


def _check_names(evaluate: Iterable[str]) -> None:
    for name in evaluate:
        if not _NAME.fullmatch(name):
            raise UserError(f"--eval-data {name}: a text is named with letters, digits and . _ - alone, e.g. arxiv")


def _is_prepared(preset: Preset | None, name: str, path: Path) -> bool:
    """Return whether ``prepare-corpus`` makes a text: the folder is the recipe's, or does not exist yet."""
    is_from_recipe = preset is not None and preset.evaluate.get(name) == str(path)
    return name in CORPORA and (is_from_recipe or not path.is_dir())


def _tasks(specs: tuple[str, ...], split: str, max_tokens: int | None) -> tuple[str, ...]:
    if split not in SPLITS:
        raise UserError(f"--split {split} does not exist: an algorithmic task has {', '.join(SPLITS)}")
    if max_tokens is not None:
        raise UserError("--max-tokens does not go with --algorithms: drop it")
    tasks = tuple(normalise(spec) for spec in specs)
    if not tasks:
        raise UserError('--algorithms is empty: name at least one, e.g. --algorithms "copy sort"')
    if len(set(tasks)) < len(tasks):
        raise UserError("--algorithms names one twice: leave one out")
    for task in tasks:
        build(task)
    return tasks
