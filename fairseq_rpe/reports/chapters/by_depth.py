"""Of tasks whose answer stands at a depth of the prompt: is it found at every depth, and up to which length?"""

from matplotlib.figure import Figure

from fairseq_rpe.algorithms import build
from fairseq_rpe.figures.needle_heatmaps import heat_maps
from fairseq_rpe.reports.page import Block, Text, picture
from fairseq_rpe.reports.sweep_results import HELD, ExactAnswers
from fairseq_rpe.utils.table import Cell, Row, Table, number, words


def chapter(found: ExactAnswers) -> tuple[Figure | None, list[Block]]:
    """The heat maps and what the page says of them; nothing of tasks without depths."""
    if not found.deep:
        return None, []
    grids = {task: {name: found.grid(task, name) for name in found.methods(task)} for task in found.deep}
    figure = heat_maps(grids, found.trained)
    said = "; ".join(
        f"{task}, {name}: {_ends(found.reach(task, name))}" for task in grids for name in found.methods(task)
    )
    drawn = picture(
        figure,
        f"Exact match in per cent by length and depth. At every depth at least {HELD:g} %: {said}.",
        "Exact match by length in tokens and depth: 0 is the first place of the prompt, 1 the last one.",
    )
    blocks: list[Block] = [drawn]
    for task in grids:
        blocks += [_reached(found, task), _table(found, task), Text(_chance(found, task))]
    return figure, blocks


def _ends(reach: int | None) -> str:
    return "no length" if reach is None else f"up to {reach} tokens"


def _reached(found: ExactAnswers, task: str) -> Table:
    """By length the exact answers at the worst depth, and up to which length they are enough."""
    names = found.methods(task)
    worst = {name: found.worst(task, name) for name in names}
    lengths = sorted({n for own in worst.values() for n in own})
    rows = [
        Row(name, [*(number(worst[name].get(n), ".0f") for n in lengths), words(_ends(found.reach(task, name)))])
        for name in names
    ]
    caption = (
        f"{task}: exact match in % at the depth with the fewest, by length in tokens; last, up to which length it is "
        f"at least {HELD:g} % at every depth."
    )
    return Table(caption, ["method", *map(str, lengths), "found"], rows)


def _table(found: ExactAnswers, task: str) -> Table:
    """What the heat map shows, in numbers."""
    grids = {name: found.grid(task, name) for name in found.methods(task)}
    lengths, depths = (sorted({key[axis] for grid in grids.values() for key in grid}) for axis in (0, 1))
    rows = [
        Row(name, [Cell(str(n), n), *(number(grid.get((n, depth)), ".0f") for depth in depths)])
        for name, grid in grids.items()
        for n in lengths
        if any((n, depth) in grid for depth in depths)
    ]
    head = ["method", "tokens", *(f"{depth:g}" for depth in depths)]
    return Table(f"{task}: exact match in % by length and, across, depth.", head, rows)


def _chance(found: ExactAnswers, task: str) -> str:
    built = build(task)
    lengths = sorted({row.result.length for row in found.rows if row.task == task})
    least, most = (built.chance(n) for n in (lengths[-1], lengths[0]))
    if least is None or most is None:
        return f"{task}: mean over the seeds."
    shares = [f"{100 * least:.3g}"] + [f"{100 * most:.3g}"] * (least != most)
    examples = sorted({row.result.examples for row in found.rows if row.task == task})
    many = " or ".join(map(str, examples))
    return f"{task}: a guess is right in {' to '.join(shares)} %; {many} examples of each length and depth."
