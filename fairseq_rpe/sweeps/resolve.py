"""What a sweep is: its options, resolved from the command line and an optional recipe, and the digests of its data."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairseq_rpe.algorithms import SPLITS, build, normalise
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.data.prepare_options import CORPORA
from fairseq_rpe.questions import dataset
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.training_config import IDENTITY, TrainingConfig
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Preset, QuestionFolder, Recipe, RecipeKind, recipe_kind
from fairseq_rpe.sweeps.sweep_record import Method

_DEFAULT_PRESET = "laptop"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Sweep:
    """A resolved sweep.

    Attributes:
        out: output folder of the sweep; it need not exist.
        methods: methods that are compared: encodings, with positions and settings of their own.
        data: folder with the text of the training, None for generated tasks.
        algorithms: specs of generated tasks such as ``copy``; each is trained separately.
        lengths: lengths of the evaluation in tokens, or in items of the tasks (empty for all); with ``questions``
            lengths of the context.
        seeds: seeds with which each method is trained.
        split: split that results are computed on: ``valid`` or ``test`` of a text, or a split of the tasks.
        max_tokens: largest batch of the evaluation in tokens, None for the default.
        jobs: concurrent runs on this machine, None for as many as the GPUs or cores allow.
        base_config: options that all trainings share.
        kind: name of what the models are evaluated on: text, algorithms (generated tasks) or answers (questions).
        recipe_name: name or path of the recipe on the command line, None without one.
        recipe: contents of the recipe, None without one.
        preset: sizes and settings of the recipe that are used, None without a recipe.
        preparation: words after ``fairseq-rpe`` of the command that prepares ``data`` from the recipe's corpus; empty
            without such a corpus, and if the user names a folder that exists.
        prerequisites: methods that others continue and that are not compared themselves.
        evaluate: further texts of the evaluation, by name.
        prepared: names of the texts in ``evaluate`` that ``prepare-corpus`` makes.
        questions: folders to fine-tune and evaluate on, by name.
        evaluate_at: numbers of updates after which the models are evaluated, too; ascending.
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
    base_config: TrainingConfig
    kind: str
    recipe_name: str | None
    recipe: Recipe | None
    preset: Preset | None = None
    preparation: tuple[str, ...] = ()
    prerequisites: tuple[Method, ...] = ()
    evaluate: Mapping[str, Path] = field(default_factory=dict)
    prepared: frozenset[str] = frozenset()
    questions: Mapping[str, QuestionFolder] = field(default_factory=dict)
    evaluate_at: tuple[int, ...] = ()

    @property
    def trained(self) -> tuple[Method, ...]:
        """All methods that are trained. Methods that continue others come last, after what they continue."""
        return tuple(sorted((*self.prerequisites, *self.methods), key=lambda method: method.continues is not None))

    def preparation_of_text(self, name: str) -> tuple[str, ...]:
        """Return the words after ``fairseq-rpe`` that prepare ``evaluate[name]`` with the vocabulary of ``data``.

        If nothing is known about the text, SOURCE stands for files that the user has to name.
        """
        command = ("prepare-corpus", name) if name in CORPORA else ("prepare", "SOURCE")
        return (*command, "--out", str(self.evaluate[name]), "--vocab-from", str(self.data))

    def preparation_of_questions(self, name: str) -> tuple[str, ...]:
        """Return the words after ``fairseq-rpe`` that prepare ``questions[name]`` with the vocabulary of ``data``.

        If the recipe has no command, NAME stands for sets that the user has to name.
        """
        folder = self.questions[name]
        command = folder.prepare or ("prepare-questions", "NAME")
        return (*command, "--out", folder.data, "--vocab-from", str(self.data))


@dataclass(frozen=True)
class Inputs:
    """Digests of the data of a sweep, computed once; an empty digest stands for a folder that does not exist yet.

    Attributes:
        data: digest of the text of the training, None for generated tasks.
        texts: digests of the further texts of the evaluation, by name.
        questions: digests of the folders of questions, by name.
    """

    data: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    questions: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Draft:
    """Options of a sweep that a recipe may fill or refuse; None and empty ones are open. See :class:`Sweep`."""

    kind: RecipeKind
    max_tokens: int | None
    base_config: TrainingConfig
    data: Path | None
    algorithms: tuple[str, ...] | None
    lengths: tuple[int, ...] | None
    seeds: tuple[int, ...] | None
    out: Path | None
    evaluate: dict[str, Path]
    evaluate_at: tuple[int, ...] | None
    methods: list[Method] = field(default_factory=list)
    recipe: Recipe | None = None
    preset: Preset | None = None
    preparation: tuple[str, ...] = ()
    prerequisites: list[Method] = field(default_factory=list)
    questions: dict[str, QuestionFolder] = field(default_factory=dict)


def build_sweep(
    base: TrainingConfig,
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
    evaluate_at: tuple[int, ...] | None = None,
) -> Sweep:
    """Resolve the options of ``fairseq-rpe sweep``; a recipe fills those that are ``None``.

    Args:
        base: options of every training, except encoding, seed, task and folders; the positions are for ``encodings``.
        data: folder with the text of the training.
        algorithms: specs of generated tasks, in place of ``data``.
        encodings: specs of the encodings to compare.
        recipe: name or file of a recipe, in place of ``encodings``.
        preset: name of a size preset of the recipe; ``laptop`` if None.
        methods: names of methods of the recipe, or ``("all",)``.
        lengths: lengths of the evaluation, in tokens or in items of the tasks.
        out: output folder; ``runs/RECIPE-PRESET`` if None and there is a recipe.
        split: split that results are computed on; ``test`` if None, with questions ``valid``.
        max_tokens: largest batch of the evaluation in tokens.
        seeds: seeds with which each method is trained; 1 alone if None.
        jobs: concurrent runs on this machine.
        eval_data: names and folders of further texts; in a recipe of kind ``answers``, of questions.
        evaluate_at: numbers of updates after which the models are evaluated, too.

    Returns:
        The sweep with every option resolved; its folders are not read.

    Raises:
        UserError: an option is missing, or options contradict each other.
    """
    if (recipe is None) == (encodings is None):
        raise UserError('name what to compare: either --encodings "SPEC SPEC ..." or --recipe NAME')
    kind = recipe_kind("algorithms" if algorithms is not None else "text")
    draft = _Draft(kind, max_tokens, base, data, algorithms, lengths, seeds, out, _by_name(eval_data), evaluate_at)
    if recipe is not None:
        _apply_recipe(draft, recipe, preset or _DEFAULT_PRESET, methods)
    elif methods is not None:
        raise UserError("--methods belongs to --recipe: list encodings with --encodings")
    elif preset is not None:
        raise UserError(f"--preset {preset} belongs to a recipe: drop it, or name the recipe with --recipe")
    else:
        draft.methods = [
            Method(
                name=spec,
                rpe=spec,
                positions_train=base.positions_train or IDENTITY,
                positions_eval=base.positions_eval,
            )
            for spec in encodings or ()
        ]
    _check_draft(draft)
    split = split or draft.kind.default_split
    tasks = () if draft.algorithms is None else _tasks(draft.algorithms, split, max_tokens)
    if draft.out is None:
        raise UserError("--out is missing: name the folder of the sweep")
    return Sweep(
        out=draft.out,
        methods=tuple(draft.methods),
        data=draft.data,
        algorithms=tasks,
        lengths=draft.lengths or (),
        seeds=draft.seeds or (1,),
        split=split,
        max_tokens=max_tokens,
        jobs=jobs,
        # the methods have the positions, and a sweep follows its runs by their JSON logs
        base_config=replace(draft.base_config, positions_train=None, positions_eval=None, log_format="json"),
        kind=draft.kind.name,
        recipe_name=recipe,
        recipe=draft.recipe,
        preset=draft.preset,
        preparation=draft.preparation,
        prerequisites=tuple(draft.prerequisites),
        evaluate=draft.evaluate,
        prepared=frozenset(name for name, path in draft.evaluate.items() if _is_prepared(draft.preset, name, path)),
        questions=draft.questions,
        evaluate_at=tuple(sorted(draft.evaluate_at or ())),
    )


def _apply_recipe(draft: _Draft, recipe_name: str, preset_name: str, method_names: tuple[str, ...] | None) -> None:
    """Fill the open options of a draft from a recipe.

    The order matters: if the preset has questions, ``--eval-data`` names folders of questions, so the texts of the
    preset come after them. Methods need the training length.
    """
    if draft.base_config.positions_train or draft.base_config.positions_eval:
        raise UserError("--positions-train and --positions-eval do not go with --recipe: its methods name them")
    draft.recipe = recipe = recipes.load(recipe_name)
    draft.kind = recipe_kind(recipe.kind)
    draft.preset = preset = recipe.preset(preset_name)
    selected = recipe.select_methods(method_names if method_names is not None else preset.methods or ("all",))
    _apply_data(draft, recipe, preset)
    draft.lengths, draft.seeds = draft.lengths or preset.lengths, draft.seeds or preset.seeds
    draft.evaluate_at = draft.evaluate_at or preset.evaluate_at
    draft.out = draft.out or Path("runs") / f"{recipe.name}-{preset_name}"
    draft.base_config = preset.fill_config(draft.base_config)
    train_tokens = (
        draft.base_config.tokens or defaults_for(draft.base_config.arch or "tiny", preset.algorithms is not None).tokens
    )
    if preset.questions:
        draft.questions, draft.evaluate = preset.question_folders(draft.evaluate), {}
        draft.lengths = draft.lengths or ((preset.tuning and preset.tuning.tokens) or train_tokens,)
        if draft.max_tokens is not None:
            raise UserError(f"recipe '{recipe.name}' asks questions: drop --max-tokens, which is about perplexity")
    draft.evaluate = {**{name: Path(path) for name, path in preset.evaluate.items()}, **draft.evaluate}
    _check_names({**draft.evaluate, **draft.questions})
    continued = {method.continues for method in selected} - {method.name for method in selected}
    draft.prerequisites = [preset.resolve_method(m, train_tokens) for m in recipe.methods if m.name in continued]
    draft.methods = [preset.resolve_method(method, train_tokens) for method in selected]


def _apply_data(draft: _Draft, recipe: Recipe, preset: Preset) -> None:
    """Fill the tasks or the text of a draft, and the command that prepares the text if it is not the user's."""
    if draft.kind.generates_data and draft.data is not None:
        raise UserError(f"recipe '{recipe.name}' generates its data: drop {draft.data}")
    if not draft.kind.generates_data and draft.algorithms is not None:
        raise UserError(f"recipe '{recipe.name}' compares on text: drop --algorithms")
    if draft.algorithms is None:
        draft.algorithms = preset.algorithms
    if draft.data is None and preset.data is not None:
        draft.data = Path(preset.data)  # the recipe's folder, whether it exists or not
        draft.preparation = preset.preparation(draft.data)
    elif draft.data is not None and not draft.data.is_dir():  # the user's, to be made
        draft.preparation = preset.preparation(draft.data)


def _check_draft(draft: _Draft) -> None:
    """Raise UserError if an option is missing or contradicts another one."""
    if not draft.methods:
        raise UserError('--encodings is empty: name at least one, e.g. --encodings "alibi type1"')
    if len({method.name for method in draft.methods}) < len(draft.methods):
        raise UserError("--encodings names one twice: leave one out")
    if (draft.data is None) == (draft.algorithms is None):
        raise UserError('name what to train on: either a DATA folder or --algorithms "SPEC ..."')
    if draft.lengths is None and draft.algorithms is None:
        raise UserError("--lengths is missing: name the lengths to evaluate in tokens, e.g. 512,1024")
    if draft.evaluate and draft.algorithms is not None:
        raise UserError("--eval-data is for text: drop it, a generated task is evaluated on itself")
    if draft.evaluate_at:
        if draft.kind.name != "text":
            raise UserError("--evaluate-at is about perplexities: drop it, or compare the encodings on a text")
        if continued := next((method for method in draft.methods if method.continues), None):
            raise UserError(
                f"--evaluate-at is for methods that continue no other: drop it, or leave out '{continued.name}'"
            )


def _by_name(eval_data: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    """Return the folders of ``--eval-data`` by name; raise UserError for bad or repeated names."""
    if len({name for name, _ in eval_data}) < len(eval_data):
        raise UserError("--eval-data gives one name twice: leave one out")
    _check_names(paths := dict(eval_data))
    return paths


def _check_names(names: Iterable[str]) -> None:
    """Raise UserError if a text or folder of questions has a name that does not suit file names."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(f"--eval-data {name}: a text is named with letters, digits and . _ - alone, e.g. arxiv")


def _is_prepared(preset: Preset | None, name: str, path: Path) -> bool:
    """Return whether ``prepare-corpus`` makes a text: the folder is the recipe's, or does not exist yet."""
    is_from_recipe = preset is not None and name in preset.evaluate and Path(preset.evaluate[name]) == path
    return name in CORPORA and (is_from_recipe or not path.is_dir())


def _tasks(specs: tuple[str, ...], split: str, max_tokens: int | None) -> tuple[str, ...]:
    """Return the normalised specs of generated tasks; raise UserError if an option does not fit."""
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
        build(task)  # only for its errors
    return tasks


def load_inputs(sweep: Sweep, dry: bool = False) -> Inputs:
    """Check and digest the texts and question folders of a sweep.

    Args:
        sweep: sweep whose folders are checked.
        dry: whether commands are only printed; then folders that the recipe prepares need not exist.

    Returns:
        The digests.

    Raises:
        UserError: a folder is missing or incomplete, or has another vocabulary than the recipe or the training.
    """
    if sweep.data is None:
        return Inputs()
    digest: str = ""
    symbols: Sequence[str] | None = None  # of a text that does not exist yet
    if not (dry and sweep.preparation and not sweep.data.is_dir()):
        digest, symbols = _check_training_text(sweep, sweep.data)
    texts = _check_evaluation_texts(sweep, symbols, dry, digest)
    return Inputs(digest, texts, _check_questions(sweep, symbols, dry))


def _check_training_text(sweep: Sweep, data: Path) -> tuple[str, Sequence[str]]:
    """Check the text of the training, and return its digest and its vocabulary."""
    if sweep.preparation and not data.is_dir():
        command = shlex.join(("fairseq-rpe", *sweep.preparation))
        raise UserError(f"data folder {data} does not exist: make it with {command}")
    if dataset.is_question_folder(data):
        raise UserError(
            f"{data} holds questions, and a sweep trains on a text first: name a text, and give the questions to "
            f"a recipe about answers, e.g. --recipe fire-scrolls --eval-data NAME={data}"
        )
    # with questions, the models are not scored on this text
    corpus.check_folder(data, "train", "valid", *([] if sweep.questions else [sweep.split]))
    if sweep.preset is not None:
        sweep.preset.check(data)
    return corpus.corpus_digest(data), corpus.read_dictionary(data / "dict.txt")


def _check_evaluation_texts(sweep: Sweep, symbols: Sequence[str] | None, dry: bool, digest: str) -> dict[str, str]:
    """Check further texts of the evaluation, which must differ and have the vocabulary of the training.

    ``symbols`` of the text of the training is None, and ``digest`` empty, if it does not exist yet.

    Returns the digests by name.
    """
    digests: dict[str, str] = {}
    names_by_digest = {digest: "the one that is trained on"} if digest else {}
    for name, path in sweep.evaluate.items():
        command = shlex.join(("fairseq-rpe", *sweep.preparation_of_text(name)))
        if not path.is_dir():
            if dry and name in sweep.prepared:
                digests[name] = ""
                continue
            raise UserError(f"data folder {path} does not exist: make it with {command}")
        corpus.check_text_folder(path, sweep.split)
        _check_vocabulary(sweep, path, symbols, command)
        digests[name] = corpus.corpus_digest(path)
        if same := names_by_digest.get(digests[name]):
            raise UserError(f"--eval-data {name}: {path} holds the same text as {same}: leave it out")
        names_by_digest[digests[name]] = name
    return digests


def _check_vocabulary(sweep: Sweep, path: Path, symbols: Sequence[str] | None, command: str) -> None:
    """Check that a folder has the vocabulary of the training; ``command`` prepares one that has."""
    if symbols is not None and corpus.read_dictionary(path / "dict.txt") != symbols:
        raise UserError(f"{path} has another vocabulary than {sweep.data}: prepare another folder, e.g. {command}")


def _check_questions(sweep: Sweep, symbols: Sequence[str] | None, dry: bool) -> dict[str, str]:
    """Check that question folders exist, have all splits, and have the vocabulary of the training.

    ``symbols`` is None if the text of the training does not exist yet.

    Returns the digests by name.
    """
    digests: dict[str, str] = {}
    for name, folder in sweep.questions.items():
        path, command = Path(folder.data), shlex.join(("fairseq-rpe", *sweep.preparation_of_questions(name)))
        if not path.is_dir():
            if dry and folder.prepare:
                digests[name] = ""
                continue
            raise UserError(f"data folder {path} does not exist: make it with {command}")
        if not dataset.is_question_folder(path):
            raise UserError(f"{path} holds no questions: make another folder, e.g. with {command}")
        corpus.check_folder(path, "train", "valid")
        _check_vocabulary(sweep, path, symbols, command)
        digests[name] = dataset.dataset_digest(path)
    return digests
