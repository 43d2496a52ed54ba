"""``selftest``: check every attention backend with every encoding on this machine against float64."""

import argparse
import sys
from pathlib import Path

from fairseq_rpe.cli.options import add_device, add_rpe_module, spec_list
from fairseq_rpe.utils.json_files import write_json

_FILE = "selftest.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``selftest``."""
    parser.description = (
        "Compute attention with every encoding, backend and dtype, and compare it with the float64 reference. The "
        "cases are forward, backward, left padding, one query with cached keys, unevenly spaced positions, and one key "
        "head for all query heads. Print times, and errors as multiples of the tolerance (1 is the limit). "
        "Combinations that a backend does not support are not failures."
    )
    about = "encodings to check (default: all, and a few with attention options)"
    parser.add_argument("--encodings", type=spec_list, default=(), metavar='"SPEC ..."', help=about)
    parser.add_argument(
        "--backends", type=spec_list, default=("all",), metavar='"NAME ..."', help="backends to check (default: all)"
    )
    about = "dtypes among fp32, bf16, fp16 (default: fp32,bf16)"
    parser.add_argument(
        "--dtype", dest="dtypes", type=spec_list, default=("fp32", "bf16"), metavar="NAME,...", help=about
    )
    add_device(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {_FILE}, to attach to a bug report")
    add_rpe_module(parser)


def run(args: argparse.Namespace) -> int:
    """Run ``selftest``."""
    from tqdm import tqdm

    from fairseq_rpe import __version__
    from fairseq_rpe.analysis import selftest
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.runs.environment import git_commit
    from fairseq_rpe.utils.devices import resolve_device
    from fairseq_rpe.utils.files import PACKAGE_DIR
    from fairseq_rpe.utils.records import from_attributes

    setting = from_attributes(selftest.SelftestSetting, args, device=resolve_device(args.device))
    setting.check()
    if args.out is not None:
        check_output(args.out, (_FILE,))
    about, cells = {"fairseq_rpe": __version__, "commit": git_commit(PACKAGE_DIR)}, []
    tests = setting.tests()
    for number, test in enumerate(tqdm(tests, disable=None, unit="encoding"), 1):
        cells += test()
        if args.out is not None:  # partial results in case this is interrupted
            document = selftest.as_document(setting, cells, about, complete=number == len(tests))
            write_json(args.out / _FILE, document)
    print("\n".join([*(table.to_markdown() for table in selftest.tables(cells)), *selftest.reasons(cells)]))
    print(selftest.summary(cells))
    failed = any(cell.state == selftest.FAILED for cell in cells)
    if failed:
        print("error: some backends compute wrong results on this machine", file=sys.stderr)
    return int(failed)
