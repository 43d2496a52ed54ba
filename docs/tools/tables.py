"""Write the tables of README.md and docs/*.md that follow from the code: ``python docs/tools/tables.py [--check]``.

The text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` becomes what NAME of ``TABLES`` gives.
Sources: the registries and verdicts of the package, the parser of its command line, its recipes, and scripts/*.sh.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from fairseq_rpe import algorithms, encodings, positions
from fairseq_rpe.analysis.backend_support import matrix
from fairseq_rpe.analysis.convergence import verdict
from fairseq_rpe.cli.main import COMMANDS, build_parser
from fairseq_rpe.core.registry import Description, Registry
from fairseq_rpe.core.spec import Option, show
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.sweeps import recipes

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
HEADS = 2  # of the encodings that are judged: each head is a proof


def pages() -> list[Path]:
    """What may have generated tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; a bar inside a cell does not end it."""
    lines = [head, ["---"] * len(head), *([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def own(registry: Registry) -> list[Description]:
    """What this package registers, without what other packages or tests add."""
    return [one for one in registry.describe() if registry.get(one.name).__module__.startswith("fairseq_rpe.")]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def given(options: Iterable[Option]) -> str:
    """Options with their defaults, as they are written in a spec."""
    return ", ".join(code(f"{option.key}={show(option.default)}") for option in options)


def option_rows(found: Sequence[Description]) -> Iterator[tuple[str, ...]]:
    """A row per option; what several have in common is said once."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        for option in one.options:
            values = ", ".join(code(show(choice)) for choice in option.choices or ())
            row = (code(option.key), code(show(option.default)), values, option.help)
            owners.setdefault(row, []).append(one.name)
    for (key, *rest), names in owners.items():
        yield (", ".join(map(code, names)), key, *rest)


def decision(one: Description) -> str:
    """Whether Σ exp(bias) converges, proved for two heads of every published form of the encoding."""
    forms = [choice for option in one.options if option.key == "form" for choice in option.choices or ()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        heads = [head for spec in [one.name, *(f"{one.name}:form={f}" for f in forms)] for head in verdict(spec, HEADS)]
    if condition := re.search(r"converges (iff .*)$", heads[0].reason):
        return condition[1]
    [found] = {head.decision for head in heads}
    return found


def of_encodings() -> str:
    head = ("encoding", "bias at distance d = i − j, or what it does instead", "Σ exp(bias)", "options", "paper")
    found = own(encodings.base.registry)
    return table(head, ((code(e.name), code(e.formula), decision(e), given(e.options), e.paper) for e in found))


def names_of_encodings() -> str:
    return ", ".join(code(one.name) for one in own(encodings.base.registry)) + "\n"


def of_backends() -> str:
    """Which attention backend serves which encoding on a GPU, and why not; what none refuses is in one row."""
    names = [one.name for one in own(encodings.base.registry)]
    found, reasons = matrix(names)
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in found.rows:
        alike.setdefault(tuple(cell.text for cell in row.cells), []).append(code(row.name))
    rows = ((", ".join(some), *cells) for cells, some in sorted(alike.items(), key=lambda pair: -len(pair[1])))
    return table(found.head, rows) + "\n" + "\n".join(f"{reason}<br>" for reason in reasons) + "\n"


def of_names(registry: Registry, title: str) -> str:
    head = (title, "formula", "what it does", "options", "paper")
    return table(head, ((code(e.name), code(e.formula), e.summary, given(e.options), e.paper) for e in own(registry)))


def of_options(registry: Registry, title: str) -> str:
    return table((title, "option", "default", "values", "meaning"), option_rows(own(registry)))


def of_model_flags() -> str:
    """Flags that fairseq-train gets from the model, and the tasks'; imports fairseq."""
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig

    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELMConfig
    from fairseq_rpe.tasks.algorithmic import AlgorithmicConfig
    from fairseq_rpe.tasks.question_answering import AnswersConfig

    theirs = {field.name for field in dataclasses.fields(TransformerLanguageModelConfig)}
    rows = []
    answers = {"cut", "mixture", "eval_answers"}
    configs = ((TransformerRPELMConfig, None), (AlgorithmicConfig, {"algorithm"}), (AnswersConfig, answers))
    for config, names in configs:
        for field in dataclasses.fields(config):
            about = str(field.metadata.get("help", ""))
            if field.name in (names or {field.name} - theirs) and about and not about.startswith("set by"):
                default = "" if field.default is None else code(show(field.default))
                rows.append((code("--" + field.name.replace("_", "-")), default, about))
    return table(("flag of fairseq-train", "default", "meaning"), rows)


def of_architectures() -> str:
    """Sizes of the model, and what ``train`` and ``sweep`` take where no option says otherwise; imports fairseq."""
    from fairseq_rpe.checkpoints.model_sizes import SIZES

    head = ("`--arch`", "layers", "width", "heads", "width of the feed-forward part", "activation")
    sizes = table(head, ((code(name), *map(str, size)) for name, size in SIZES.items()))
    kinds = [("tiny", False), ("tiny", True), ("wiki103", False), ("wiki103", True)]
    settings = [dataclasses.asdict(defaults_for(arch, task)) for arch, task in kinds]
    title = ("option of `train`", "tiny, text", "tiny, generated task", "any other, text", "any other, generated task")
    rows = []
    for key in settings[0]:
        # a task knows its training length itself; threads are decided by the machine, not by an option
        values = ["the task's" if key == "tokens" and not found[key] else show(found[key]) for found in settings]
        if key != "threads":
            rows.append((code("--" + key.replace("_", "-")), *values))
    return f"{sizes}\n{table(title, rows)}"


def subparsers() -> dict[str, argparse.ArgumentParser]:
    [found] = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    return found


def of_commands() -> str:
    return table(("command", "does"), ((f"[`{name}`](#{name})", about) for name, (_, about) in COMMANDS.items()))


def of_command_options() -> str:
    """Every command's arguments as its ``--help`` has them."""
    parts = []
    for name, parser in subparsers().items():
        formatter, rows = parser._get_formatter(), []
        for action in parser._actions:
            if action.dest == "help":
                continue
            word = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            flags = " ".join(code(flag) for flag in action.option_strings)
            values = code(str(word)) if not action.choices else ", ".join(map(code, map(str, action.choices)))
            about = formatter._expand_help(action) if action.help else ""
            must = "required" if flags and action.required else ""
            rows.append((" ".join(filter(None, (flags, values))), "; ".join(filter(None, (about, must)))))
        text = (parser.description, table(("argument", "meaning"), rows) if rows else None, parser.epilog)
        parts.append("\n\n".join([f"### {name}", *(part.strip() for part in text if part)]))
    return "\n\n".join(parts) + "\n"


def of_scripts() -> str:
    rows = []
    for path in sorted((ROOT / "scripts").glob("*.sh")):
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
        comment = " ".join(line.removeprefix("# ") for line in lines[: lines.index("set -euo pipefail")])
        said, _, goes = comment.rstrip(".").partition("; all ")
        said = said.removeprefix("Sets up .venv if needed, then ").rstrip(".")
        rows.append((code(path.name), said[0].lower() + said[1:], code(goes.partition(" go to ")[2])))
    return table(("script", "does", "passes its arguments to"), rows)


def of_recipes() -> str:
    rows = []
    for name in recipes.names():
        recipe = recipes.load(name)
        for size, scale in recipe.scales.items():
            methods = ", ".join(scale.methods or (method.name for method in recipe.methods))
            lengths = ", ".join(map(str, scale.lengths or ()))
            trained = [scale.arch, f"{scale.tokens} tokens" if scale.tokens else None, f"{scale.updates} updates"]
            if scale.tuning:
                trained.append(f"then {scale.tuning.tokens} tokens, {scale.tuning.updates} updates")
            asked = [folder.data for folder in scale.questions.values()]
            on = ", ".join([scale.data, *scale.evaluate.values(), *asked] if scale.data else scale.algorithms or ())
            first = (code(name), f"{recipe.title}. {recipe.paper}") if size == next(iter(recipe.scales)) else ("", "")
            rows.append((*first, size, on, ", ".join(filter(None, trained)), lengths, methods))
    return table(("recipe", "what it repeats", "scale", "on", "model", "evaluated at", "methods"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "encodings": of_encodings,
    "encoding-names": names_of_encodings,
    "encoding-options": lambda: of_options(encodings.base.registry, "encoding"),
    "backends": of_backends,
    "positions": lambda: of_names(positions.base.registry, "transform"),
    "position-options": lambda: of_options(positions.base.registry, "transform"),
    "algorithms": lambda: of_names(algorithms.base.registry, "task"),
    "algorithm-options": lambda: of_options(algorithms.base.registry, "task"),
    "model-flags": of_model_flags,
    "architectures": of_architectures,
    "commands": of_commands,
    "command-options": of_command_options,
    "scripts": of_scripts,
    "recipes": of_recipes,
}


def renewed(text: str) -> str:
    """A page with its generated parts as the code has them now; KeyError: one of another name."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of README.md and docs/*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is stale")
    stale = []
    check = parser.parse_args().check
    for path in pages():
        before = path.read_text(encoding="utf-8")
        if (after := renewed(before)) != before:
            stale.append(path)
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale, run python docs/tools/tables.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
