"""README.md and docs/*.md: short enough, generated tables as the code has them now, links and examples that work."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fairseq_rpe import attend, encodings
from fairseq_rpe.encodings.base import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_README_LINES = 165
MAX_WIDTH = 120


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/tools/{name}.py")
    module = sys.modules[f"docs_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return tool("tables")


@pytest.fixture(scope="module")
def commands() -> ModuleType:
    return tool("commands")


def prose(path: Path) -> str:
    """A page without its code blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!\[)`[^`\n]+`(?!\])", "", text)


def anchors(path: Path) -> set[str]:
    """Names of a page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES
    assert [line for line in lines if len(line) > MAX_WIDTH and not line.startswith("|")] == []


def test_files_of_the_architecture_are_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([a-z_]+/[a-z_0-9/]+\.py)`", text))
    assert len(files) > 30
    assert [name for name in files if not (ROOT / "fairseq_rpe" / name).exists() and not (ROOT / name).exists()] == []


def test_the_picture_of_the_packages_follows_from_the_imports():
    architecture = tool("architecture")
    picture = architecture.svg(architecture.package_imports())
    assert (ROOT / "docs/architecture.svg").read_text(encoding="utf-8") == picture
    imports = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert architecture.without_implied(imports) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert architecture.layers(imports) == [["c"], ["b"], ["a"]]


def test_links_and_pictures_are_there():
    links = [(path, link) for path in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(path))]
    for path, link in links:
        place, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", place):
            target = (path.parent / place).resolve() if place else path
            assert target.is_relative_to(ROOT) and target.exists(), f"{path.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\(docs/([a-z0-9-]+\.md)\)", prose(ROOT / "README.md")))
    assert {path.name for path in PAGES if path.parent == ROOT / "docs"} <= linked


@pytest.mark.parametrize("left_out", [{"costs"}, pytest.param(set(), marks=pytest.mark.release)], ids=["fast", "all"])
def test_generated_tables_are_fresh(left_out, tables, monkeypatch, capsys):
    """The table of costs takes seconds: before a release."""
    for block in (block for path in tables.pages() for block in tables.BLOCK.findall(path.read_text(encoding="utf-8"))):
        if block[1] in left_out:
            monkeypatch.setitem(tables.TABLES, block[1], lambda text=block[2]: text)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0, capsys.readouterr().out
    found = []
    for path in tables.pages():
        text = path.read_text(encoding="utf-8")
        blocks = [block[1] for block in tables.BLOCK.findall(text)]
        assert text.count("<!-- generated:") == text.count("<!-- end -->") == len(blocks), path
        found += blocks
    assert sorted(found) == sorted(tables.TABLES)


def test_a_stale_table_is_named_and_written_again(tables, tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    page.write_text("# A\n\n<!-- generated: encoding-families -->\n`gone`\n<!-- end -->\n\nafter\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1 and "README.md: stale" in capsys.readouterr().out and "`gone`" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 0 and capsys.readouterr().out == "README.md: written\n"
    text = page.read_text()
    assert "`gone`" not in text and "`alibi`" in text and text.endswith("<!-- end -->\n\nafter\n")


def family_rows(tables: ModuleType) -> dict[str, list[list[str]]]:
    """The cells of the encodings of each family in docs/encodings.md, by the name of the block."""
    page = (ROOT / "docs/encodings.md").read_text(encoding="utf-8")
    blocks = {name: text for _, name, text, _ in tables.BLOCK.findall(page) if name.startswith("family-")}
    rows = {
        name: re.findall(r"^\| (`.*?) \|$", text.split("| option |")[0], re.MULTILINE) for name, text in blocks.items()
    }
    return {name: [re.split(r" ?(?<!\\)\| ?", row) for row in family] for name, family in rows.items()}


def test_every_encoding_is_in_the_section_of_its_family(tables):
    sections = family_rows(tables)
    assert list(sections) == [f"family-{tables.family_anchor(family)}" for family in FAMILIES]
    listed = {row[0].strip("`"): name for name, rows in sections.items() for row in rows}
    registry = encodings.base.registry
    expected = {entry.name: registry.get(entry.name).family for entry in tables.package_entries(registry)}
    assert listed == {name: f"family-{tables.family_anchor(family)}" for name, family in expected.items()}
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/encodings.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [heading for heading in headings if heading in map(tables.family_title, FAMILIES)] == [
        tables.family_title(family) for family in FAMILIES
    ]


def test_columns_of_encodings_are_those_of_the_registry(tables):
    cells = {row[0].strip("`"): row for rows in family_rows(tables).values() for row in rows}
    learned, needs = ({name: row[column] for name, row in cells.items()} for column in (4, 5))
    assert (learned["alibi"], needs["alibi"]) == ("none", "")
    assert learned["kerple_log"] == "16 shared"  # two numbers per head
    assert learned["cope"] == "4,096 per layer" and learned["complex"] == "256 per word shared (always)"
    # a start per layer and a shared equation
    assert learned["floater"] == f"{3 * 512:,} per layer, {2 * (512 * 513 + 512):,} shared"
    assert needs["bipe"] == "token ids, no position transform" and needs["clex"] == "the length of the row"
    assert needs["selective"] == "all scores of a query, a state of each key"
    assert cells["tisa"][3] == "Translation-invariant self-attention." and "arXiv 2106.01950" in cells["tisa"][6]


def test_the_column_of_sums_is_what_is_proved(tables):
    said = {row[0].strip("`"): row[2] for rows in family_rows(tables).values() for row in rows}
    assert said["alibi"] == "converges" and said["inv_n"] == "diverges" and said["kerple_log"] == "iff p > 1"
    for spec, found in (("kerple_log:p=1.001", "converges"), ("kerple_log:p=1", "diverges")):
        assert {head.decision for head in tables.verdict(spec, 2)} == {found}


def test_the_encoding_of_the_readme_works(tmp_path):
    [code] = re.findall(r"```python\n(# my_encoding.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "my_encoding.py").write_text(code)
    encodings.load_module(tmp_path / "my_encoding.py")
    profile = encodings.build("steps", heads=4, width=32).bias_profile(6)
    expected = -torch.arange(1, 5)[:, None] * torch.arange(6).double().log1p()
    assert profile.dtype == torch.float64 and torch.allclose(profile, expected)


def test_the_encodings_of_the_contributing_page_work(tmp_path):
    found = re.findall(r"```python\n# (my_\w+.py)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert [name for name, _ in found] == ["my_encoding.py", "my_content.py"]
    for name, code in found:
        (tmp_path / name).write_text(code)
        encodings.load_module(tmp_path / name)
    profile = encodings.build("root:power=0.3", heads=4, width=32).bias_profile(6)
    torch.testing.assert_close(profile, -math.log(2) * torch.arange(6).double().pow(0.3).expand(4, -1))

    keyed = encodings.build("keyed_alibi", heads=4, width=32)
    torch.nn.init.normal_(keyed.weight)
    q, k, v = torch.randn(3, 2, 4, 7, 8)
    slope = torch.nn.functional.softplus((k * keyed.weight[:, None]).sum(-1))
    bias = -slope[:, :, None] * (torch.arange(7)[:, None] - torch.arange(7)).clamp_min(0)
    hidden = torch.ones(7, 7).triu(1).bool()
    weights = (q @ k.mT / 8**0.5 + bias).masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(attend(q, k, v, keyed), weights @ v, rtol=1e-4, atol=1e-5)


def test_every_command_of_the_docs_is_one(commands):
    """Commands parse, scripts, files, extras and recipes are there, examples are Python."""
    assert list(commands.faults()) == []
    found = [one for path in commands.pages() for one in commands.examples(path)]
    assert len(found) > 80 and sum(not one.reason for one in found) > 40
    assert {name for one in found for name in one.small} == set(commands.SMALL)


WRONG = {
    "fairseq-rpe trian DATA": "no command",
    "fairseq-rpe eval CHECKPOINT DATA --lengths 64 --colour": "--colour",
    "bash scripts/eval.sh CHECKPOINT": "DATA",
    "bash scripts/evaluate.sh DATA": "no script",
    "bash scripts/setup.sh --fast": "has no --fast",
    "bash scripts/sweep.sh --recipe none": "none",
    "bash scripts/train.sh DATA --rpe alibe --out x": "alibe",
    "python benchmarks/attention.py --olny fire": "has no --olny",
    "pip install -e '.[nothing]'": "no extra nothing",
}


def test_a_wrong_command_is_told(commands):
    for text, wrong in WRONG.items():
        assert wrong in commands.check(commands.Example("a.md", 1, text))
    for text in ("fairseq-rpe eval CHECKPOINT DATA --lengths 64,1024", "fairseq-rpe verdict --formula '-log(1+n)'"):
        assert commands.check(commands.Example("a.md", 1, text)) == ""


def test_marks_settings_and_joined_lines_of_a_block(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    page = tmp_path / "a.md"
    mark = "<!-- not run 1: a GPU --> <!-- small: kerple -->"
    page.write_text(
        f"# A\n\ntext\n\n{mark}\n\n    bash x.sh  # a\n    R=runs\n    bash y.sh \\\n        --z $R\n\n    a = b\n"
    )
    first, last = commands.examples(page)
    assert (first.text, first.line, first.reason) == ("bash x.sh  # a", 7, "a GPU")
    assert last.settings == ("R=runs",)
    assert (last.text, last.line, last.reason, last.small) == ("bash y.sh --z $R", 9, "", ("kerple",))
    assert commands.check_span("fairseq-rpe eval --lenghts 3") == "eval has no --lenghts"
    assert commands.check_span("fairseq-rpe eval --lengths N") == commands.check_span("some words") == ""
