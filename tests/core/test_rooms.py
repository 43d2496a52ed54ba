"""The house as docs/architecture.md says it is: arrows, circles, names and sizes, read from the source."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import PACKAGE, run
from house import ARROWS, FAIRSEQ, GLUE, House

HOUSE = House(PACKAGE)
# Inside functions: packages that not everybody has, and those that read their surroundings when they are imported.
OPTIONAL = {"huggingface_hub", "pyarrow", "submitit", "tokenizers", "triton", "pooch", "torchdiffeq", "rouge_score"}
OPTIONAL |= {"datasets", "sklearn", "scipy"}
# Inside functions as well, because they are slow to import and most calls of their files do without them.
SLOW = {"matplotlib", "tensorboard", "torch", "numpy", "sentencepiece", "mpmath", "sympy", "flint", "tqdm", "jinja2"}
FAIRSEQS = {"fairseq", "fairseq_cli"}


def test_rooms_import_only_what_is_above_them_and_no_two_files_each_other():
    assert {HOUSE.room(name) for name in HOUSE.files} == set(ARROWS)
    assert HOUSE.wrong_arrows(ARROWS) == HOUSE.circles() == []


def test_imports_inside_functions_are_of_the_command_that_is_called_or_optional():
    late = HOUSE.late()
    # the kernels need the package triton, which is optional; a model's inspector is loaded where one is asked for
    ours = late.pop(".", set()) - {"attention.triton", "models.transformer_rpe_lm"}
    assert {HOUSE.room(name) for name in ours} <= {"cli"}, ours
    third = {name: files for name, files in late.items() if name not in sys.stdlib_module_names}
    assert set(third) <= OPTIONAL | SLOW | FAIRSEQS, third


def test_only_the_glue_and_what_runs_models_know_fairseq():
    assert HOUSE.importers("fairseq", "fairseq_cli") <= FAIRSEQ
    # packages that come with it; one of them computes scores of answers too, and is asked for by itself there
    assert HOUSE.importers("omegaconf", "hydra", "bitarray", "sacrebleu", "torchaudio", "cffi") <= GLUE
    assert HOUSE.importers("sklearn") <= GLUE | {"questions"}


def test_rules_see_what_is_wrong_in_a_made_up_house(tmp_path):
    """The same rules on a small tree with one fault of each kind."""
    root = tmp_path / "small"
    for name, text in {
        "__init__.py": "",
        "core/__init__.py": "",
        "core/errors.py": "",
        "core/low.py": "def f():\n    from ..runs import start\n",
        "runs/__init__.py": "",
        "runs/start.py": "from small.core.errors import X\nfrom small.runs import plan\n",
        "runs/plan.py": "import fairseq\n\ndef f(a: dict[str, Any]) -> None:\n    from . import start\n",
        "cli/train.py": "from ..runs import start\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    house = House(root)
    arrows = {"core": set(), "runs": {"core"}, "cli": {"runs"}}
    assert house.wrong_arrows(arrows) == ["core.low imports runs.start"]
    assert house.wrong_arrows({**arrows, "core": {"runs"}, "cli": set()}) == ["cli.train imports runs.start"]
    assert house.circles() == [{"runs.plan", "runs.start"}, {"runs.plan", "runs.start"}]
    assert house.late() == {".": {"core.low", "runs.plan"}}
    assert house.importers("fairseq") == {"runs"}
    assert house.signatures_with("dict[str, Any]") == ["runs.plan:3"]
    (root / "core/low.py").write_text("")
    (root / "runs/plan.py").write_text("")
    house = House(root)
    assert house.wrong_arrows(arrows) == [] and house.circles() == [] and house.late() == {}


def test_no_file_is_longer_than_500_lines():
    assert [name for name in HOUSE.files if HOUSE.lines(name) > 500] == []


def test_parsed_arguments_stay_in_the_command_line():
    texts = {name: path.read_text(encoding="utf-8") for name, path in HOUSE.files.items()}
    found = [name for name, text in texts.items() if "argparse" in text and HOUSE.room(name) != "cli"]
    # fairseq's own parsers get flags of ours, and its checkpoints hold parsed arguments
    assert found == ["checkpoints.checkpoint", "checkpoints.checkpoint_file", "compat.flags", "compat.safe_loading"]


def test_records_cross_the_rooms_that_carry_things_out():
    rooms = ("runs", "evaluation", "sweeps", "reports")
    assert [one for one in HOUSE.signatures_with("dict[str, Any]") if one.startswith(rooms)] == []


WITHOUT = 'assert not {"matplotlib", "fairseq_rpe.modules.encoding_logger", "fairseq_rpe.analysis"} & set(sys.modules)'


def test_models_load_no_figures():
    run(sys.executable, "-c", f"import sys, fairseq_rpe.models\n{WITHOUT}", cwd=Path(PACKAGE).parent)
