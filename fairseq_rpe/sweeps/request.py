"""What a sweep is asked to be, and what that comes to: a recipe's settings filled in, methods and tasks named."""

from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_rpe.algorithms import SPLITS, build, normalise
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.settings import IDENTITY, Request
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Recipe, Scale
from fairseq_rpe.sweeps.state import Method


@dataclass(frozen=True)
class Sweep:
    """A resolved sweep.

    ``lengths``: in tokens, or items of the ``algorithms`` (none: all there are). ``jobs`` runs at a time.
    ``preparation``: what makes ``data``, where the recipe says so and the folder is its own or not there yet.
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


def resolve(
    base: Request,
    *,
    data: Path | None,
    algorithms: tuple[str, ...] | None,
    encodings: tuple[str, ...] | None,
    recipe: str | None,
    scale: str,
    methods: tuple[str, ...] | None,
    lengths: tuple[int, ...] | None,
    out: Path | None,
    subset: str,
    max_tokens: int | None,
    seeds: tuple[int, ...] | None,
    jobs: int | None,
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
    if recipe is not None:
        if base.positions_train or base.positions_eval:
            raise UserError("--positions-train and --positions-eval do not go with --recipe: its methods name them")
        found = recipes.load(recipe)
        size = found.scale(scale)
        compared = found.choose(methods if methods is not None else size.methods or ("all",))
        if found.kind == "text" and algorithms is not None:
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
    elif methods is not None:
        raise UserError("--methods belongs to --recipe: list encodings with --encodings")
    else:
        moved = (base.positions_train or IDENTITY, base.positions_eval)
        compared = [Method(spec, spec, *moved) for spec in encodings or ()]
    if not compared:
        raise UserError('--encodings is empty: name at least one, e.g. --encodings "alibi type1"')
    if len({m.name for m in compared}) < len(compared):
        raise UserError("--encodings names one twice: leave one out")
    if (data is None) == (algorithms is None):
        raise UserError('name what to train on: either a DATA folder or --algorithms "SPEC ..."')
    if lengths is None and algorithms is None:
        raise UserError("--lengths is missing: name the lengths to evaluate in tokens, e.g. 512,1024")
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
    )


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
