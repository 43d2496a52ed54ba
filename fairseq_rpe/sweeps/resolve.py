"""What a sweep is asked to be, and what that comes to: a recipe's settings filled in, methods and tasks named."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairseq_rpe.algorithms import SPLITS, build, normalise
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.prepare_options import KNOWN
from fairseq_rpe.runs.settings import IDENTITY, Request
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.fine_tuning_config import Folder
from fairseq_rpe.sweeps.recipes import Recipe, Scale
from fairseq_rpe.sweeps.sweep_record import Method

_SCALE = "laptop"  # where none is named
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Sweep:
    """A resolved sweep.

    ``lengths``: in tokens, or items of the ``algorithms`` (none: all there are). ``jobs`` runs at a time.
    ``preparation``: what makes ``data``, where the recipe says so and the folder is its own or not there yet.
    ``needed``: methods that others continue and that are not compared themselves. ``evaluate``: by name, other texts
    to evaluate on; those of ``prepared`` are made as the recipe says. ``questions``: by name, folders to fine-tune on
    and to ask; ``lengths`` are then of contexts.
    """

    out: Path
    methods: tuple[Method, ...]
    data: Path | None
    algorithms: tuple[str, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    subset: str
    max_tokens: int | None
    jobs: int | None
    base: Request
    recipe_name: str | None
    recipe: Recipe | None
    scale: Scale | None = None
    preparation: tuple[str, ...] = ()
    needed: tuple[Method, ...] = ()
    evaluate: Mapping[str, Path] = field(default_factory=dict)
    prepared: frozenset[str] = frozenset()
    questions: Mapping[str, Folder] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[Method, ...]:
        """Every method that is trained, those first that others continue."""
        return tuple(sorted((*self.needed, *self.methods), key=lambda method: method.continues is not None))

    def preparing(self, name: str) -> tuple[str, ...]:
        """The words after ``fairseq-rpe`` that make a text to evaluate on, with the vocabulary of the training."""
        what = ("prepare-known", name) if name in KNOWN else ("prepare", "SOURCE")
        return (*what, "--dest", str(self.evaluate[name]), "--vocab-from", str(self.data))

    def preparing_questions(self, name: str) -> tuple[str, ...]:
        """The words after ``fairseq-rpe`` that make a folder of questions, with the vocabulary of the training."""
        folder = self.questions[name]
        return (*(folder.prepare or ("prepare-answers", "NAME")), "--dest", folder.data, "--vocab-from", str(self.data))


def resolve(
    base: Request,
    *,
    data: Path | None,
    algorithms: tuple[str, ...] | None,
    encodings: tuple[str, ...] | None,
    recipe: str | None,
    scale: str | None,
    methods: tuple[str, ...] | None,
    lengths: tuple[int, ...] | None,
    out: Path | None,
    subset: str | None,
    max_tokens: int | None,
    seeds: tuple[int, ...] | None,
    jobs: int | None,
    eval_data: Sequence[tuple[str, Path]] = (),
) -> Sweep:
    """The sweep that the options of ``fairseq-rpe sweep`` ask for; a recipe says what they leave open (``None``).

    ``base``: what is asked of every run beside its encoding, seed, task and folders, with the positions of plain
    encodings. Raises UserError: it is not said what to compare, on what, or where; or what is said does not go
    together.
    """
    if (recipe is None) == (encodings is None):
        raise UserError('name what to compare: either --encodings "SPEC SPEC ..." or --recipe NAME')
    found = size = None
    preparation: tuple[str, ...] = ()
    needed: list[Method] = []
    evaluate, questions = _named(eval_data), dict[str, Folder]()
    if recipe is not None:
        if base.positions_train or base.positions_eval:
            raise UserError("--positions-train and --positions-eval do not go with --recipe: its methods name them")
        found = recipes.load(recipe)
        scale = scale or _SCALE
        size = found.scale(scale)
        compared = found.choose(methods if methods is not None else size.methods or ("all",))
        if found.kind != "algorithms" and algorithms is not None:
            raise UserError(f"recipe '{found.name}' compares on text: drop --algorithms")
        if found.kind == "algorithms" and data is not None:
            raise UserError(f"recipe '{found.name}' generates its data: drop {data}")
        algorithms = size.algorithms if algorithms is None else algorithms
        if data is None and size.data is not None:
            data = Path(size.data)
            preparation = size.preparation(data)
        elif data is not None and not data.is_dir():
            preparation = size.preparation(data)
        lengths, seeds = lengths or size.lengths, seeds or size.seeds
        out = out or Path("runs") / f"{found.name}-{scale}"
        base = size.under(base)
        if found.kind == "answers":
            questions, evaluate = _questions(size, evaluate), {}
            lengths = lengths or ((size.tuning and size.tuning.tokens) or base.tokens or base.defaults.tokens,)
            if max_tokens is not None:
                raise UserError(f"recipe '{found.name}' asks questions: drop --max-tokens, which is about perplexity")
        evaluate = {**{name: Path(place) for name, place in size.evaluate.items()}, **evaluate}
        _check_names({**evaluate, **questions})
        tokens = base.tokens or base.defaults.tokens
        named, continued = {one.name for one in compared}, {one.continues for one in compared}
        needed = [size.settled(one, tokens) for one in found.methods if one.name in continued - named]
        compared = [size.settled(one, tokens) for one in compared]
    elif methods is not None:
        raise UserError("--methods belongs to --recipe: list encodings with --encodings")
    elif scale is not None:
        raise UserError(f"--scale {scale} is a size of a recipe: drop it, or name the recipe with --recipe")
    else:
        moved = (base.positions_train or IDENTITY, base.positions_eval)
        compared = [Method(spec, spec, *moved) for spec in encodings or ()]
    if not compared:
        raise UserError('--encodings is empty: name at least one, e.g. --encodings "alibi type1"')
    if len({m.name for m in compared}) < len(compared):
        raise UserError("--encodings names one twice: leave one out")
    subset = subset or ("valid" if questions else "test")
    if (data is None) == (algorithms is None):
        raise UserError('name what to train on: either a DATA folder or --algorithms "SPEC ..."')
    if lengths is None and algorithms is None:
        raise UserError("--lengths is missing: name the lengths to evaluate in tokens, e.g. 512,1024")
    if evaluate and algorithms is not None:
        raise UserError("--eval-data is for text: drop it, a generated task is evaluated on itself")
    tasks = () if algorithms is None else _tasks(algorithms, subset, max_tokens)
    if out is None:
        raise UserError("--out is missing: name the folder of the sweep")
    return Sweep(
        out=out,
        methods=tuple(compared),
        data=data,
        algorithms=tasks,
        lengths=lengths or (),
        seeds=seeds or (1,),
        subset=subset,
        max_tokens=max_tokens,
        jobs=jobs,
        base=replace(base, positions_train=None, positions_eval=None, log_format="json"),
        recipe_name=recipe,
        recipe=found,
        scale=size,
        preparation=preparation,
        needed=tuple(needed),
        evaluate=evaluate,
        prepared=frozenset(name for name, place in evaluate.items() if _is_made(size, name, place)),
        questions=questions,
    )


def _named(given: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    if len({name for name, _ in given}) < len(given):
        raise UserError("--eval-data gives one name twice: leave one out")
    _check_names(named := dict(given))
    return named


def _questions(size: Scale, given: Mapping[str, Path]) -> dict[str, Folder]:
    """The folders of a scale, or those given by name in their place, of which the scale may know how they are made."""
    if not given:
        return dict(size.questions)
    return {name: replace(size.questions.get(name, Folder("")), data=str(place)) for name, place in given.items()}


def _check_names(evaluate: Iterable[str]) -> None:
    for name in evaluate:
        if not _NAME.fullmatch(name):
            raise UserError(f"--eval-data {name}: a text is named with letters, digits and . _ - alone, e.g. arxiv")


def _is_made(size: Scale | None, name: str, place: Path) -> bool:
    """Whether a text is one that the recipe names, or a known one that is not there yet."""
    of_recipe = size is not None and size.evaluate.get(name) == str(place)
    return name in KNOWN and (of_recipe or not place.is_dir())


def _tasks(specs: tuple[str, ...], subset: str, max_tokens: int | None) -> tuple[str, ...]:
    if subset not in SPLITS:
        raise UserError(f"--subset {subset} does not exist: an algorithmic task has {', '.join(SPLITS)}")
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
