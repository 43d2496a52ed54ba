"""``passkey``: a heat map of right pass keys over the length of the text and the depth of the key."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_rpe.cli.options import (
    add_figure_width,
    add_loading_options,
    choice_count,
    int_list,
    positive_int,
    seed,
    spec,
)
from fairseq_rpe.utils.records import from_attributes

if TYPE_CHECKING:
    from fairseq_rpe.evaluation.passkey import PasskeyResult

_RESULTS, _CSV, _PNG, _MODEL = "passkey.jsonl", "passkey.csv", "passkey.png", "model"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``passkey``."""
    parser.description = (
        "Hide a pass key in a long text, ask a model of text for it, and draw the share of right answers by the length "
        "of the text and the depth of the key. Results in --out are not measured again."
    )
    about = "checkpoint of a model of text, or folder of a transformers model"
    parser.add_argument("model", type=Path, metavar="MODEL", help=about)
    about = "lengths in tokens, of the text and the answer together"
    parser.add_argument("--lengths", type=int_list, required=True, metavar="N,N", help=about)
    about = "number of depths, evenly spaced from 0 to 1 (default: %(default)s)"
    parser.add_argument("--depths", type=positive_int, default=11, metavar="N", help=about)
    about = "examples of each length and depth (default: %(default)s)"
    parser.add_argument("--examples", type=positive_int, default=20, metavar="N", help=about)
    about = "generation: generate the key; likelihood: choose the most likely key (default: %(default)s)"
    parser.add_argument("--answer", choices=("generation", "likelihood"), default="generation", help=about)
    about = "keys among which --answer likelihood chooses (default: 8)"
    parser.add_argument("--choices", type=choice_count, metavar="N", help=about)
    about = "text file whose sentences surround the key (default: the sentences of arXiv 2305.16300)"
    parser.add_argument("--filler", type=Path, metavar="FILE", help=about)
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="seed of the keys (default: %(default)s)")
    about = "evaluate with this encoding instead of the model's"
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    add_loading_options(parser)
    about = f"folder of {_RESULTS}, {_CSV} and {_PNG}; of a transformers model also its checkpoint, in {_MODEL}"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=about)
    add_figure_width(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``passkey``."""
    from fairseq_rpe.core.errors import UserError
    from fairseq_rpe.data.folder import check_output

    if args.choices is not None and args.answer == "generation":
        raise UserError("--choices has no effect on --answer generation: give --answer likelihood, or drop it")
    args.choices = args.choices or 8
    check_output(args.out, (_RESULTS, _CSV, _PNG))
    args.checkpoint = _import_folder(args, args.out / _MODEL) if args.model.is_dir() else args.model

    from fairseq_rpe.evaluation.checkpoint_defaults import with_checkpoint_rotation
    from fairseq_rpe.evaluation.passkey import PasskeyRequest, measure_passkeys
    from fairseq_rpe.utils.progress import Progress

    request = with_checkpoint_rotation(from_attributes(PasskeyRequest, args))
    results = []
    cells = len(request.lengths) * request.depths
    with Progress("pass keys", "examples", cells * request.examples, ends=True) as bar:
        for result in measure_passkeys(request, args.out / _RESULTS, bar):
            results.append(result)
            bar.write(f"length {result.length}, depth {result.depth:g}: {result.right} of {result.examples}")
    _write_outputs(results, args.out, args.figure_width)


def _import_folder(args: argparse.Namespace, out: Path) -> Path:
    """Return the checkpoint of a transformers model, which is made once."""
    from fairseq_rpe.adapters.import_model import CHECKPOINT, import_model, read_source
    from fairseq_rpe.core.errors import UserError
    from fairseq_rpe.data.transformers_tokenizer import load_model_vocabulary
    from fairseq_rpe.evaluation.passkey import make_prompts

    folder = args.model.resolve()
    make_prompts(load_model_vocabulary(folder).encode, args.filler, args.lengths)  # refuses before weights are read
    if not out.exists():
        return import_model(folder, out)
    if read_source(out) != str(folder):
        raise UserError(f"{out} is the checkpoint of another model: give another --out")
    return out / CHECKPOINT


def _write_outputs(results: "list[PasskeyResult]", out: Path, width: str | None) -> None:
    """Write the table and the figure."""
    from fairseq_rpe.figures.heat_maps import draw_needle_maps
    from fairseq_rpe.figures.style import figures_at_width, save
    from fairseq_rpe.utils.files import atomic_write
    from fairseq_rpe.utils.table import csv_text

    names = ("length", "depth", "examples", "right", "accuracy")
    atomic_write(out / _CSV, csv_text(names, ([getattr(row, name) for name in names] for row in results)))
    grid = {(row.length, row.depth): 100 * row.accuracy for row in results}
    title = results[0].rpe or results[0].encoding
    with figures_at_width(width):
        figure = draw_needle_maps({"passkey": {title: grid}}, {"passkey": results[0].train_length or math.inf})
        save(figure, out / _PNG)
    print(f"numbers: {out / _CSV}")
    print(f"figure:  {out / _PNG}")
