"""The imports between packages that docs/architecture.md allows, and the lengths of files, read from the source."""

from __future__ import annotations

import re
import sys

from conftest import PACKAGE
from package_imports import ALLOWED_IMPORTS, FAIRSEQ, GLUE, SCIENCE, PackageImports, _reachable

IMPORTS = PackageImports(PACKAGE)
# Inside functions: packages that not everybody has, and those that read their surroundings when they are imported.
OPTIONAL = {"huggingface_hub", "pyarrow", "submitit", "tokenizers", "triton", "pooch", "torchdiffeq", "rouge_score"}
OPTIONAL |= {"datasets", "lm_eval", "sklearn"}
# Inside functions as well, because they are slow to import and most calls of their files do without them.
SLOW = {"matplotlib", "tensorboard", "torch", "numpy", "sentencepiece", "mpmath", "sympy", "flint", "tqdm", "jinja2"}
SLOW |= {"scipy"}
FAIRSEQS = {"fairseq", "fairseq_cli"}
LOADED_BY_NAME = ("cli.", "kinds.")  # a command, or a kind of sweep


def test_packages_import_only_what_they_may_and_no_two_files_each_other():
    assert {IMPORTS.package(name) for name in IMPORTS.files} == set(ALLOWED_IMPORTS)
    assert IMPORTS.forbidden_imports(ALLOWED_IMPORTS) == IMPORTS.cycles() == []


def test_imports_inside_functions_are_of_the_called_command_or_of_optional_packages():
    late = IMPORTS.imports_in_functions()
    # the kernels need the package triton, which is optional; a model loads its encoding logger on request
    ours = late.pop(".", set()) - {"attention.triton", "models.transformer_rpe_lm"}
    # a kind of sweep loads the chapters of its report, which draw, when a report is written
    assert {IMPORTS.package(name) for name in ours} <= {"cli", "kinds"}, ours
    third = {name: files for name, files in late.items() if name not in sys.stdlib_module_names}
    assert set(third) <= OPTIONAL | SLOW | FAIRSEQS, third


def test_only_packages_that_run_models_import_fairseq():
    assert IMPORTS.importers("fairseq", "fairseq_cli") <= FAIRSEQ
    # packages that come with it; one of them computes scores of answers too, and is imported alone there
    assert IMPORTS.importers("omegaconf", "hydra", "bitarray", "sacrebleu", "torchaudio", "cffi") <= GLUE
    assert IMPORTS.importers("sklearn") <= GLUE | {"questions"}


def test_an_exported_model_needs_no_fairseq():
    imported_by: dict[str, set[str]] = {name: set() for name in IMPORTS.files}
    for item in IMPORTS.imports:
        if IMPORTS.local(item.module) and not item.inside:
            imported_by[item.file].add(IMPORTS.local(item.module))
    packages = {IMPORTS.package(name) for name in _reachable("adapters.pretrained", imported_by)}
    assert packages <= {*SCIENCE, "decoder", "adapters"}


def test_rules_find_every_kind_of_violation(tmp_path):
    """The same rules on a small tree with one fault of each kind."""
    root = tmp_path / "small"
    for name, text in {
        "__init__.py": "",
        "core/__init__.py": "",
        "core/errors.py": "",
        "core/low.py": "def f():\n    from ..runs import start\n",
        "runs/__init__.py": "",
        "runs/start.py": "from small.core.errors import X\nif TYPE_CHECKING:\n    from small.runs import plan\n",
        "runs/plan.py": "import fairseq\n\ndef f(a: dict[str, Any]) -> None:\n    from . import start\n",
        "cli/train.py": "from ..runs import start\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    imports = PackageImports(root)
    allowed = {"core": set(), "runs": {"core"}, "cli": {"runs"}}
    assert imports.forbidden_imports(allowed) == ["core.low imports runs.start"]
    assert imports.forbidden_imports({**allowed, "core": {"runs"}, "cli": set()}) == ["cli.train imports runs.start"]
    assert imports.cycles() == [{"runs.plan", "runs.start"}, {"runs.plan", "runs.start"}]
    assert imports.imports_in_functions() == {".": {"core.low", "runs.plan"}}
    assert imports.importers("fairseq") == {"runs"}
    assert imports.signatures_with("dict[str, Any]") == ["runs.plan:3"]
    (root / "core/low.py").write_text("")
    (root / "runs/plan.py").write_text("")
    imports = PackageImports(root)
    assert imports.forbidden_imports(allowed) == [] and imports.cycles() == [] and imports.imports_in_functions() == {}


def test_files_have_at_most_about_500_lines():
    assert [name for name in IMPORTS.files if IMPORTS.lines(name) > 530] == []


def test_parsed_arguments_stay_in_the_command_line():
    texts = {name: path.read_text(encoding="utf-8") for name, path in IMPORTS.files.items()}
    found = [name for name, text in texts.items() if "argparse" in text and IMPORTS.package(name) != "cli"]
    # fairseq's own parsers get flags of ours, and its checkpoints hold parsed arguments
    assert found == ["checkpoints.checkpoint", "checkpoints.checkpoint_file", "compat.flags", "compat.safe_loading"]


def test_typed_records_pass_between_packages_that_run_things():
    packages = ("runs", "evaluation", "sweeps", "reports")
    assert [one for one in IMPORTS.signatures_with("dict[str, Any]") if one.startswith(packages)] == []


def test_the_files_that_a_sweep_passes_are_listed_and_few():
    page = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    example = page.partition("## Example 2")[2].partition("## Example 3")[0]
    first, last = re.findall(r"Steps (\d+) to (\d+) pass (\d+) files", example)
    steps = {int(row[1]): row[0] for row in re.finditer(r"(?m)^\| (\d+) \|.*$", example)}
    for (begin, end, count), most in ((first, 16), (last, 8)):
        rows = "".join(steps[step] for step in range(int(begin), int(end) + 1))
        files = set(re.findall(r"`([\w/]+)\.py`", rows))
        assert len(files) == int(count) <= most, files
        modules = {name.replace("/", ".") for name in files}
        imported = {IMPORTS.local(item.module) for item in IMPORTS.imports if item.file in {*modules, "cli.sweep"}}
        assert [name for name in modules - imported if not name.startswith(LOADED_BY_NAME)] == []
