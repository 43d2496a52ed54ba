"""Write the generated tables of README.md and docs/*.md: ``python docs/tools/tables.py [--check]``.

The text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is replaced by the result of NAME in ``TABLES``.
Sources: the registries and verdicts of the package, the parser of its command line, its recipes, and scripts/*.sh.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from fairseq_rpe import algorithms, encodings, positions
from fairseq_rpe.analysis.backend_support import support_matrix
from fairseq_rpe.analysis.convergence import verdict
from fairseq_rpe.cli import plan
from fairseq_rpe.cli.main import COMMANDS, build_parser
from fairseq_rpe.core.attention_options import QUERY_SCALES, AttentionOptions
from fairseq_rpe.core.registry import Description, Registry
from fairseq_rpe.core.spec import Option, format_value, list_options
from fairseq_rpe.decoder.config import BLOCK_PRESETS
from fairseq_rpe.encodings.base import FAMILIES, Encoding
from fairseq_rpe.encodings.model import LayerEncodings, build_for_model
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.cost_model import estimate_runs, sum_runs
from fairseq_rpe.sweeps.device_kinds import Hardware, find_device
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_kind import sweep_kind

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAPER_SCALE = {"paper", "large"}  # presets of the sizes that papers train
HEADS = 2  # heads per encoding in convergence verdicts
EXAMPLE_HEADS, EXAMPLE_WIDTH, EXAMPLE_LENGTH = 8, 512, 512  # model for which learned parameters are counted
FORMULA = "bias at distance d = i − j, or what it does instead"


def pages() -> list[Path]:
    """Return the pages that may have generated tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars inside cells are escaped."""
    lines = [head, ["---"] * len(head), *([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def package_entries(registry: Registry) -> list[Description]:
    """Return the entries that this package registers, without those of other packages or tests."""
    return [entry for entry in registry.describe() if registry.get(entry.name).__module__.startswith("fairseq_rpe.")]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def option_defaults(options: Iterable[Option]) -> str:
    """Return options with their defaults, as they are written in a spec."""
    return ", ".join(code(f"{option.key}={format_value(option.default)}") for option in options)


def option_rows(entries: Sequence[Description]) -> Iterator[tuple[str, ...]]:
    """Yield a row per option; equal options of several entries share a row."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        for option in entry.options:
            values = ", ".join(code(format_value(choice)) for choice in option.choices or ())
            row = (code(option.key), code(format_value(option.default)), values, option.help)
            owners.setdefault(row, []).append(entry.name)
    for (key, *rest), names in owners.items():
        yield (", ".join(map(code, names)), key, *rest)


def convergence(entry: Description) -> str:
    """Return whether Σ exp(bias) converges, proved for two heads of every published variant of the encoding."""
    variants = [choice for option in entry.options if option.key == "variant" for choice in option.choices or ()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        specs = [entry.name, *(f"{entry.name}:variant={variant}" for variant in variants)]
        heads = [head for spec in specs for head in verdict(spec, HEADS)]
    if condition := re.search(r"converges (iff .*)$", heads[0].reason):
        return condition[1]
    [decision] = {head.decision for head in heads}
    return decision


def learned_parameters(name: str) -> str:
    """Return the number of learned parameters of an encoding, per layer and shared by all layers."""
    one, two = ({id(p): p.shape for p in _example_model(name, layers).parameters()} for layers in (1, 2))
    if not one:
        return "none"
    if any(shape[0] == 0 for shape in one.values() if shape):  # a row for each word of a dictionary, empty here
        counts = {"shared": f"{sum(shape[1:].numel() for shape in one.values()):,} per word"}
    else:
        total, of_two_layers = (sum(shape.numel() for shape in shapes.values()) for shapes in (one, two))
        per_layer = of_two_layers - total
        counts = {"per layer": per_layer and f"{per_layer:,}", "shared": total > per_layer and f"{total - per_layer:,}"}
    always = " (always)" if len(encodings.base.registry.get(name).sharing_modes) == 1 else ""
    return ", ".join(f"{count} {sharing}{always}" for sharing, count in counts.items() if count)


def requirements(encoding: Encoding) -> str:
    """Return what an encoding needs besides queries, keys and positions."""
    needs = {
        "token ids": encoding.needs_token_ids,
        "whole positions": encoding.position_type == "whole",
        "no position transform": encoding.position_type == "none",
        "the length of the row": encoding.length_dependent,
        "inputs of the layer": encoding.has_token_features,
        "all scores of a query": encoding.needs_all_scores,
        "a state of each key": encoding.has_key_state,
    }
    return ", ".join(name for name, is_needed in needs.items() if is_needed)


def plain_summary(entry: Description) -> str:
    """Return the summary of an entry without citations in brackets, which the column of papers has."""
    text = re.sub(r" \([^()]*\b(?:19|20)\d\d\b[^()]*\)", "", entry.summary)
    return text.replace("``", "`")


def _example_model(name: str, layers: int = 1) -> LayerEncodings:
    """Return the encodings of a model with the default options, for the size that the column of parameters assumes."""
    with torch.random.fork_rng(devices=[]):
        return build_for_model(name, EXAMPLE_HEADS, EXAMPLE_WIDTH, layers, EXAMPLE_LENGTH)


def family_entries(family: str) -> list[Description]:
    registry = encodings.base.registry
    return [entry for entry in package_entries(registry) if registry.get(entry.name).family == family]


def family_title(family: str) -> str:
    return family[0].upper() + family[1:]


def family_anchor(family: str) -> str:
    """Return the name of the heading of a family in docs/encodings.md."""
    return re.sub(r"[^\w\- ]", "", family.lower()).replace(" ", "-")


def family_section(family: str) -> str:
    """Return the heading of a family, its table of encodings and its table of options."""
    head = ("encoding", FORMULA, "Σ exp(bias)", "what it does", "learned parameters", "needs", "paper")
    entries = family_entries(family)
    rows = []
    for entry in entries:
        needs = requirements(_example_model(entry.name)[0])
        facts = (convergence(entry), plain_summary(entry), learned_parameters(entry.name), needs)
        rows.append((code(entry.name), code(entry.formula), *facts, entry.paper))
    about = FAMILIES[family]
    blocks = [f"## {family_title(family)}", f"{about[0].upper()}{about[1:]}.", markdown_table(head, rows).rstrip()]
    if any(entry.options for entry in entries):
        blocks.append(options_table(entries, "encoding").rstrip())
    return "\n\n".join(blocks) + "\n"


def encoding_families() -> str:
    """Return the names of the encodings, a row per family."""
    rows = []
    for family, about in FAMILIES.items():
        names = ", ".join(code(entry.name) for entry in family_entries(family))
        rows.append((f"[{family}](docs/encodings.md#{family_anchor(family)})", names, about))
    return markdown_table(("family", "encodings", "what it does"), rows)


def backends_table() -> str:
    """Return which attention backends support which encodings on a GPU, with reasons; equal rows are merged."""
    names = [entry.name for entry in package_entries(encodings.base.registry)]
    matrix, reasons = support_matrix(names)
    equal_rows: dict[tuple[str, ...], list[str]] = {}
    for row in matrix.rows:
        equal_rows.setdefault(tuple(cell.text for cell in row.cells), []).append(code(row.name))
    rows = ((", ".join(names), *cells) for cells, names in sorted(equal_rows.items(), key=lambda pair: -len(pair[1])))
    return markdown_table(matrix.header, rows) + "\n" + "\n".join(f"{reason}<br>" for reason in reasons) + "\n"


def entries_table(registry: Registry, title: str) -> str:
    head = (title, "formula", "what it does", "options", "paper")
    return markdown_table(
        head,
        (
            (code(e.name), code(e.formula), e.summary, option_defaults(e.options), e.paper)
            for e in package_entries(registry)
        ),
    )


def options_table(entries: Sequence[Description], title: str) -> str:
    return markdown_table((title, "option", "default", "values", "meaning"), option_rows(entries))


def attention_options_table() -> str:
    """Return the options that every encoding has."""
    rows = []
    for option in list_options(AttentionOptions):
        values = ", ".join(code(format_value(choice)) for choice in option.choices or ())
        rows.append((code(option.key), code(format_value(option.default)), values, option.help))
    return markdown_table(("option", "default", "values", "meaning"), rows)


def query_scales_table() -> str:
    """Return the values of the option ``query_scale`` with their formulas."""
    rows = []
    for name, method in QUERY_SCALES.items():
        default = "" if method.value is None else format_value(method.value)
        rows.append((code(name), code(method.formula), default if method.uses_value else ""))
    return markdown_table(("`query_scale`", "factor of query i", "default of `query_scale_value`"), rows)


def model_flags_table() -> str:
    """Return the flags of fairseq-train that the model and the tasks add; imports fairseq."""
    from fairseq.models.transformer_lm import TransformerLanguageModelConfig

    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELMConfig
    from fairseq_rpe.tasks.algorithmic import AlgorithmicConfig
    from fairseq_rpe.tasks.question_answering import QuestionAnsweringConfig

    fairseq_fields = {field.name for field in dataclasses.fields(TransformerLanguageModelConfig)}
    model_fields = {field.name for field in dataclasses.fields(TransformerRPELMConfig)} - fairseq_fields
    shown_fields = {
        TransformerRPELMConfig: model_fields,
        AlgorithmicConfig: {"algorithm"},
        QuestionAnsweringConfig: {"truncate", "mixture", "eval_answers"},
    }
    rows = []
    for config, names in shown_fields.items():
        for field in dataclasses.fields(config):
            about = str(field.metadata.get("help", ""))
            if field.name in names and about and not about.startswith("set by"):
                default = "" if field.default is None else code(format_value(field.default))
                rows.append((code("--" + field.name.replace("_", "-")), default, about))
    return markdown_table(("flag of fairseq-train", "default", "meaning"), rows)


def architectures_table() -> str:
    """Return the sizes of the model and the defaults of ``train`` and ``sweep``."""
    from fairseq_rpe.checkpoints.model_sizes import MODEL_SIZES

    head = ("`--arch`", "layers", "width", "heads", "width of the feed-forward part", "activation")
    sizes = markdown_table(head, ((code(name), *map(str, size)) for name, size in MODEL_SIZES.items()))
    kinds = [("tiny", False), ("tiny", True), ("wiki103", False), ("wiki103", True)]
    settings = [dataclasses.asdict(defaults_for(arch, task)) for arch, task in kinds]
    title = ("option of `train`", "tiny, text", "tiny, generated task", "any other, text", "any other, generated task")
    rows = []
    for key in settings[0]:
        # the machine determines the threads; settings without a default here have the same default for all models
        if key == "threads" or all(defaults[key] is None for defaults in settings):
            continue
        # a task determines its training length
        values = [
            "the task's" if key == "tokens" and not defaults[key] else format_value(defaults[key])
            for defaults in settings
        ]
        rows.append((code("--" + key.replace("_", "-")), *values))
    return f"{sizes}\n{markdown_table(title, rows)}"


def subparsers() -> dict[str, argparse.ArgumentParser]:
    [parsers] = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    return parsers


def commands_table() -> str:
    return markdown_table(
        ("command", "does"), ((f"[`{name}`](#{name})", command.help) for name, command in COMMANDS.items())
    )


def command_options() -> str:
    """Return the arguments of every command as in its ``--help``."""
    sections = []
    for name, parser in subparsers().items():
        formatter, rows = parser._get_formatter(), []
        for action in parser._actions:
            if action.dest == "help":
                continue
            word = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            flags = " ".join(code(flag) for flag in action.option_strings)
            shows_choices = action.choices and not action.metavar  # with a metavar, the help lists the choices
            values = ", ".join(map(code, map(str, action.choices))) if shows_choices else code(str(word))
            about = formatter._expand_help(action) if action.help else ""
            required = "required" if flags and action.required else ""
            rows.append((" ".join(filter(None, (flags, values))), "; ".join(filter(None, (about, required)))))
        text = (parser.description, markdown_table(("argument", "meaning"), rows) if rows else None, parser.epilog)
        sections.append("\n\n".join([f"### {name}", *(block.strip() for block in text if block)]))
    return "\n\n".join(sections) + "\n"


def scripts_table() -> str:
    rows = []
    for path in sorted((ROOT / "scripts").glob("*.sh")):
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
        comment = " ".join(line.removeprefix("# ") for line in lines[: lines.index("set -euo pipefail")])
        about, _, target = comment.rstrip(".").partition("; all ")
        about = about.removeprefix("Sets up .venv if needed, then ").rstrip(".")
        rows.append((code(path.name), about[0].lower() + about[1:], code(target.partition(" go to ")[2])))
    return markdown_table(("script", "does", "passes its arguments to"), rows)


def recipes_table() -> str:
    rows = []
    for name in recipes.names():
        recipe = recipes.load(name)
        for preset_name, preset in recipe.presets.items():
            methods = ", ".join(preset.methods or (method.name for method in recipe.methods))
            lengths = ", ".join(map(str, preset.lengths or ()))
            trained = [preset.arch, f"{preset.tokens} tokens" if preset.tokens else None, f"{preset.updates} updates"]
            if preset.tuning:
                trained.append(f"then {preset.tuning.tokens} tokens, {preset.tuning.updates} updates")
            questions = [folder.data for folder in preset.questions.values()]
            on = ", ".join(
                [preset.data, *preset.evaluate.values(), *questions] if preset.data else preset.algorithms or ()
            )
            first = (
                (code(name), f"{recipe.title}. {recipe.paper}")
                if preset_name == next(iter(recipe.presets))
                else ("", "")
            )
            rows.append((*first, preset_name, on, ", ".join(filter(None, trained)), lengths, methods))
    return markdown_table(("recipe", "what it reproduces", "preset", "on", "model", "evaluated at", "methods"), rows)


def block_presets_table() -> str:
    defaults = {"norm_position": "pre", "activation": "", "qk_norm": "none", "scale_embedding": True}
    columns = ("norm", "norm_eps", "norm_position", "bias", "activation", "qk_norm", "init")
    flags = {"activation": "--activation-fn", "init": "--block-init"}
    rows = []
    for name, preset in BLOCK_PRESETS.items():
        options = {**defaults, **preset}
        cells = [f"{options[column]:g}" if column == "norm_eps" else options[column] for column in columns]
        rows.append((code(name), *cells, "√C" if options["scale_embedding"] else "1"))
    names = [code(flags.get(column, "--" + column.replace("_", "-"))) for column in columns]
    return markdown_table((code("--block"), *names, "embeddings are multiplied by"), rows)


def costs_table() -> str:
    """Return the estimated costs of each recipe at the scale of its paper, on a named device."""
    hardware = Hardware("H100 SXM", find_device("h100"), utilisation=0.3)
    rows = []
    for name in recipes.names():
        for preset_name in sorted(PAPER_SCALE & recipes.load(name).presets.keys()):
            estimates = estimate_runs(*planned_runs(name, preset_name), hardware)
            # texts of the evaluation exist on some machines only
            estimates = [dataclasses.replace(estimate, evaluations=()) for estimate in estimates]
            totals = sum_runs(estimates, devices=8)
            largest = min(estimates, key=lambda estimate: (estimate.most_rows, -estimate.memory.peak))
            batch = f"{largest.load.rows} × {largest.load.tokens:,}"
            rows.append(
                (
                    code(name),
                    preset_name,
                    str(totals.runs),
                    f"{largest.parameters.total / 1e6:,.1f}",
                    f"{totals.tokens:.2g}",
                    f"{totals.training_flops:.2g}",
                    f"{totals.device_hours or 0:,.1f}",
                    batch,
                    f"{largest.memory.peak / 2**30:,.1f}",
                    str(largest.most_rows),
                    f"{largest.checkpoint / 2**30:.2f}",
                )
            )
    head = ("recipe", "preset", "runs", "10⁶ parameters", "tokens", "FLOPs of training", "H100 hours")
    return markdown_table((*head, "rows × tokens", "GiB", "most rows", "GiB of a checkpoint"), rows)


def planned_runs(name: str, preset: str) -> tuple[Sweep, list[SweepRun]]:
    """Return the sweep of a recipe, whose data need not exist, and its runs, with bfloat16 products."""
    words = ["plan", "--recipe", name, "--preset", preset, "--compute-dtype", "bf16"]
    args = build_parser("plan").parse_args(words)
    sweep = plan.planned_sweep(args)
    return sweep, sweep_kind(sweep.kind).build_runs(sweep, plan.presumed_inputs(sweep))


TABLES: dict[str, Callable[[], str]] = {
    "encoding-families": encoding_families,
    **{f"family-{family_anchor(family)}": partial(family_section, family) for family in FAMILIES},
    "attention-options": attention_options_table,
    "query-scales": query_scales_table,
    "backends": backends_table,
    "positions": lambda: entries_table(positions.base.registry, "transform"),
    "position-options": lambda: options_table(package_entries(positions.base.registry), "transform"),
    "algorithms": lambda: entries_table(algorithms.base.registry, "task"),
    "algorithm-options": lambda: options_table(package_entries(algorithms.base.registry), "task"),
    "model-flags": model_flags_table,
    "block-presets": block_presets_table,
    "architectures": architectures_table,
    "commands": commands_table,
    "command-options": command_options,
    "scripts": scripts_table,
    "recipes": recipes_table,
    "costs": costs_table,
}


def regenerate(text: str) -> str:
    """Return a page with new generated tables; KeyError for an unknown table."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of README.md and docs/*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is stale")
    stale = []
    check = parser.parse_args().check
    for path in pages():
        before = path.read_text(encoding="utf-8")
        if (after := regenerate(before)) != before:
            stale.append(path)
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale, run python docs/tools/tables.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
