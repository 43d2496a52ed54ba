"""What a sweep is asked to be, and what that comes to: a recipe's settings filled in, methods and tasks named."""

from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_rpe.algorithms import SPLITS, build, normalise
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.settings import IDENTITY, Request
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Recipe
from fairseq_rpe.sweeps.state import Method


@dataclass(frozen=True)
class Asked:
    """The options of ``fairseq-rpe sweep``; ``None``: not given, so that a recipe may say it.

    ``base``: what is asked of every run beside its encoding, position, seed, task and folders; it names the positions
    of plain encodings.
    """

    data: Path | None
    algorithms: tuple[str, ...] | None
    encodings: tuple[str, ...] | None
    recipe: str | None
    scale: str
    methods: tuple[str, ...] | None
    lengths: tuple[int, ...] | None
    out: Path | None
    subset: str
    max_tokens: int | None
    seeds: tuple[int, ...] | None
    jobs: int | None
    base: Request


@dataclass(frozen=True)
class Sweep:
    """A resolved sweep.

    ``lengths``: in tokens, or items of the ``algorithms`` (none: all there are). ``jobs`` runs at a time.
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


def resolve(asked: Asked) -> Sweep:
    """Fill in what a recipe says and the command line does not.

    Raises:
        UserError: it is not said what to compare, on what, or where; or what is said does not go together.
    """
    if (asked.recipe is None) == (asked.encodings is None):
        raise UserError('name what to compare: either --encodings "SPEC SPEC ..." or --recipe NAME')
    recipe = None
    if asked.recipe is not None:
        recipe = recipes.load(asked.recipe)
        asked, methods = _of_recipe(asked, recipe)
    elif asked.methods is not None:
        raise UserError("--methods belongs to --recipe: list encodings with --encodings")
    else:
        moved = (asked.base.positions_train or IDENTITY, asked.base.positions_eval)
        methods = [Method(spec, spec, *moved) for spec in asked.encodings or ()]
    if not methods:
        raise UserError('--encodings is empty: name at least one, e.g. --encodings "alibi type1"')
    if len({m.name for m in methods}) < len(methods):
        raise UserError("--encodings names one twice: leave one out")
    if (asked.data is None) == (asked.algorithms is None):
        raise UserError('name what to train on: either a DATA folder or --algorithms "SPEC ..."')
    algorithms = _algorithms(asked)
    if asked.lengths is None and not algorithms:
        raise UserError("--lengths is missing: name the lengths to evaluate in tokens, e.g. 512,1024")
    if asked.out is None:
        raise UserError("--out is missing: name the folder of the sweep")
    return Sweep(
        out=asked.out,
        methods=tuple(methods),
        data=asked.data,
        algorithms=algorithms,
        lengths=asked.lengths or (),
        seeds=asked.seeds or (1,),
        subset=asked.subset,
        max_tokens=asked.max_tokens,
        jobs=asked.jobs,
        base=replace(asked.base, positions_train=None, positions_eval=None, log_format="json"),
        recipe_name=asked.recipe,
        recipe=recipe,
    )


def _of_recipe(asked: Asked, recipe: Recipe) -> tuple[Asked, list[Method]]:
    if asked.base.positions_train or asked.base.positions_eval:
        raise UserError("--positions-train and --positions-eval do not go with --recipe: its methods name them")
    scale = recipe.scale(asked.scale)
    methods = recipe.choose(asked.methods if asked.methods is not None else scale.methods or ("all",))
    if recipe.kind == "text" and asked.algorithms is not None:
        raise UserError(f"recipe '{recipe.name}' compares on text: drop --algorithms")
    if recipe.kind == "algorithms" and asked.data is not None:
        raise UserError(f"recipe '{recipe.name}' generates its data: drop {asked.data}")
    filled = replace(
        scale.under(asked, "algorithms", "lengths", "seeds"),
        data=asked.data or (None if scale.data is None else Path(scale.data)),
        out=asked.out or Path("runs") / f"{recipe.name}-{asked.scale}",
        base=replace(scale.under(asked.base, *recipes.OF_A_RUN), extra=(*scale.extra, *asked.base.extra)),
    )
    return filled, methods


def _algorithms(asked: Asked) -> tuple[str, ...]:
    if asked.algorithms is None:
        return ()
    if asked.subset not in SPLITS:
        raise UserError(f"--subset {asked.subset} does not exist: an algorithmic task has {', '.join(SPLITS)}")
    if asked.max_tokens is not None:
        raise UserError("--max-tokens does not go with --algorithms: drop it")
    specs = tuple(normalise(spec) for spec in asked.algorithms)
    if not specs:
        raise UserError('--algorithms is empty: name at least one, e.g. --algorithms "copy sort"')
    if len(set(specs)) < len(specs):
        raise UserError("--algorithms names one twice: leave one out")
    for spec in specs:
        build(spec)
    return specs
