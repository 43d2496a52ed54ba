"""Published experiments by name: which methods to compare, on what, at which size. ``fairseq_rpe/recipes/*.toml``."""

import difflib
import itertools
import os
import re
import reprlib
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.data import folder
from fairseq_rpe.data.prepare_options import KNOWN
from fairseq_rpe.evaluation.records import Blocks
from fairseq_rpe.questions import benchmarks
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.settings import Request
from fairseq_rpe.sweeps.fine_tuning_config import Folder, Tuning
from fairseq_rpe.sweeps.sweep_record import Asking, Further, Kind, Method, Published, Training, read_published
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import PACKAGE
from fairseq_rpe.utils.records import Count, Counts, Words

FOLDER = PACKAGE / "recipes"
# in a method's specs, the training length of the scale, perhaps times a number
_LENGTH = re.compile(r"\$tokens(?:\*(\d+))?")
_SHOWN = 8
_PREPARING = ("prepare-answers", "prepare-gaps")  # the commands that make folders of questions
_SPECS = ("rpe", "rpe_eval", "positions_train", "positions_eval")
_OF_A_RUN = (*(f.name for f in fields(Training)), "rpe_share", "compute_dtype", "blocks", "separate_documents")


def divided(whole: int, request: Request) -> int:
    """Sequences of one process and batch, of the ``whole`` of an update.

    Raises UserError: they cannot be divided.
    """
    parts, freq = request.world * (request.update_freq or 1), request.update_freq
    if whole % parts:
        each = f" of {freq} batches each" if freq and freq > 1 else ""
        raise UserError(
            f"the recipe's {whole} sequences per update cannot be divided among {request.world} processes{each}: "
            "choose --nproc, --nodes and --update-freq that divide them, or --batch-sentences"
        )
    return whole // parts


@dataclass(frozen=True)
class Scale(Training):
    """A size of a recipe: what it fixes. Each is also an option of ``sweep``, which wins.

    ``batch_sentences`` is of all processes and accumulated batches of an update together. ``corpus`` is the known one
    that ``data`` is made of, with the given ``tokenizer`` or its usual one; a folder whose dictionary has not as many
    symbols as ``vocabulary`` is refused. ``evaluate``: by name, folders of other texts to evaluate on. ``further``: by
    method, the training of those that continue another one, in place of what the method itself says of it.

    A recipe for answers is trained on ``data`` first, unless the folder ``pretrained`` of another sweep has finished
    runs of the same training; then fine-tuned, as ``tuning`` says, on each of ``questions``, by name; then asked.
    """

    data: str | None = None
    corpus: str | None = None
    tokenizer: Literal["bpe", "gpt2", "words"] | None = None
    vocabulary: Count | None = None
    algorithms: Words | None = None
    methods: Words | None = None
    update_freq: Count | None = None
    blocks: Blocks | None = None
    separate_documents: bool | None = None
    rpe_share: Literal["auto", "model", "layer"] | None = None
    compute_dtype: Literal["fp32", "bf16"] | None = None
    lengths: Counts | None = None
    seeds: Counts | None = None
    evaluate: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, Further] = field(default_factory=dict)
    pretrained: str | None = None
    questions: Mapping[str, Folder] = field(default_factory=dict)
    tuning: Tuning | None = None
    asking: Asking | None = None
    extra: Words = ()

    def under(self, request: Request) -> Request:
        """``request`` with this scale's values where it has none, and the scale's further flags before its own.

        Raises UserError: the batch cannot be divided among the processes and batches of an update.
        """
        given = {name: getattr(self, name) for name in _OF_A_RUN if getattr(request, name) is None}
        freq = request.update_freq or self.update_freq
        if (request.schedule or self.schedule) != "cosine":
            given.pop("min_lr", None)
        filled = replace(request, **given, update_freq=freq, extra=(*self.extra, *request.extra))
        if request.batch_sentences is not None or request.world * (freq or 1) == 1:
            return filled
        usual = defaults_for(filled.arch or "tiny", self.algorithms is not None)
        return replace(filled, batch_sentences=divided(self.batch_sentences or usual.batch_sentences, filled))

    def settled(self, method: Method, tokens: int) -> Method:
        """A method at this size, where the training length is ``tokens``."""

        def settle(found: re.Match[str]) -> str:
            return str(tokens * int(found[1] or 1))

        specs = {name: _LENGTH.sub(settle, spec) for name in _SPECS if (spec := getattr(method, name)) is not None}
        return replace(method, **specs, further=self.further.get(method.name, method.further))

    def preparation(self, data: Path) -> tuple[str, ...]:
        """The words after ``fairseq-rpe`` that make ``data``; none where it is not a known corpus."""
        return () if self.corpus is None else ("prepare-known", self.corpus, *self._making(data))

    def _making(self, data: Path) -> list[str]:
        words = ["--dest", str(data), *(["--tokenizer", self.tokenizer] if self.tokenizer else [])]
        return words + (["--vocab-size", str(self.vocabulary)] if self.tokenizer == "bpe" and self.vocabulary else [])

    def check(self, data: Path) -> None:
        """Refuse a prepared folder with another vocabulary than this scale's."""
        if self.vocabulary is None:
            return
        symbols = len(folder.read_dictionary(data / "dict.txt"))
        kind = folder.read_manifest(data).get("tokenizer", {}).get("kind")
        if symbols == self.vocabulary and kind in (None, self.tokenizer or kind):
            return
        place = Path(self.data or data)
        if place == data:
            place = Path(f"{data}-{self.tokenizer or self.vocabulary}")
        how = self.preparation(place) or ("prepare", "SOURCE", *self._making(place))
        there, here = (f" of {name}" if name else "" for name in (kind, self.tokenizer))
        raise UserError(
            f"{data} has a vocabulary of {symbols:,} types{there}, this recipe trains on {self.vocabulary:,}{here}: "
            f"prepare another folder, e.g. fairseq-rpe {shlex.join(how)}"
        )


@dataclass(frozen=True)
class Recipe:
    """One published experiment."""

    name: str
    title: str
    paper: str
    kind: Kind
    methods: tuple[Method, ...]
    scales: Mapping[str, Scale]
    published: Published | None = None

    def scale(self, name: str) -> Scale:
        """The settings of one scale."""
        if name not in self.scales:
            scales = ", ".join(self.scales)
            raise UserError(f"recipe '{self.name}' has no scale '{name}'{nearest(name, self.scales)}; it has: {scales}")
        return self.scales[name]

    def choose(self, names: tuple[str, ...]) -> list[Method]:
        """The methods called ``names``, or all of them for ``all``."""
        table = {m.name: m for m in self.methods}
        if names == ("all",):
            return list(table.values())
        for name in names:
            if name not in table:
                raise UserError(
                    f"recipe '{self.name}' has no method '{name}'{nearest(name, table)}; "
                    f"it has: {', '.join(table)}, or all"
                )
        if len(set(names)) < len(names):
            raise UserError("--methods names one twice: leave one out")
        return [table[name] for name in names]


@dataclass(frozen=True)
class _Text:
    """A recipe's file: its tables are read one by one, so that messages name them."""

    title: str
    paper: str
    kind: Kind
    methods: dict[str, object]
    scales: dict[str, object]
    published: dict[str, object] | None = None


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Recipe:
    """The recipe called ``name``, or the one in a TOML file of that path.

    One that says ``base = "NAME"`` (or a file beside it) is that recipe with its own keys in their place; ``NAME =
    false`` under ``[scales]`` leaves out a scale of the base. Raises UserError: there is none, or it does not say what
    a recipe must.
    """
    path, given = _read(name)
    source = f"recipe {path}"
    text = records.read(_Text, given, source, "the recipe")
    methods = {}
    for label, method in text.methods.items():
        if any(blank in label for blank in " \t,"):
            raise UserError(f"{source}: method '{label}' has a blank or comma in its name")
        named = {**method, "name": label} if isinstance(method, dict) else method
        methods[label] = records.read(Method, named, source, f"method '{label}'")
    # ``false`` in place of a table drops a scale of the base
    sizes = {size: scale for size, scale in text.scales.items() if scale is not False}
    scales = {size: records.read(Scale, scale, source, f"scale '{size}'") for size, scale in sizes.items()}
    if not methods or not scales:
        raise UserError(f"{source} needs at least one method and one scale")
    _check_continued(methods, scales, source)
    _check_prepared(scales, source)
    wanted = _asked(text.kind, scales, source)
    published = read_published(text.published, source, methods) if text.published else None
    return Recipe(path.stem, text.title, text.paper, text.kind, tuple(methods.values()), wanted, published)


def _asked(kind: Kind, scales: Mapping[str, Scale], source: str) -> Mapping[str, Scale]:
    """The scales of a recipe; of a base for text, those that one for answers says something of.

    Raises UserError: answers without questions, or what is about questions in a recipe of another kind.
    """
    own = ("pretrained", "questions", "tuning", "asking")
    about = {size: [name for name in own if getattr(scale, name)] for size, scale in scales.items()}
    for size, given in about.items():
        if kind == "answers" and "questions" not in given and (given or not any(about.values())):
            raise UserError(f"{source}: scale '{size}' lacks questions: name a prepared folder of them")
        if kind != "answers" and given:
            raise UserError(f"{source}: {given[0]} of scale '{size}' is for kind answers, this recipe is for {kind}")
    return scales if kind != "answers" else {size: scales[size] for size, given in about.items() if given}


def _check_continued(methods: Mapping[str, Method], scales: Mapping[str, Scale], source: str) -> None:
    """Refuse methods that continue none that is trained from the start, and further training of those that do not."""
    for method in methods.values():
        if method.continues is not None and method.continues not in methods:
            near = nearest(method.continues, methods)
            raise UserError(f"{source}: method '{method.name}' continues an unknown method '{method.continues}'{near}")
        if method.continues is not None and methods[method.continues].continues is not None:
            raise UserError(
                f"{source}: method '{method.name}' continues '{method.continues}', which continues another one: name "
                "one that is trained from the start"
            )
        if method.further.given() and method.continues is None:
            raise UserError(f"{source}: method '{method.name}' has further training of nothing: say what it continues")
    for size, scale in scales.items():
        for name in scale.further:
            if name not in methods or methods[name].continues is None:
                raise UserError(f"{source}: further of scale '{size}' names '{name}', which continues no method")


def _check_prepared(scales: Mapping[str, Scale], source: str) -> None:
    """Check that the corpora and the sets of questions of every scale are ones that can be prepared.

    Raises:
        UserError: a corpus, a set or the command that prepares it is unknown.
    """
    for size, scale in scales.items():
        if scale.corpus is not None and scale.corpus not in KNOWN:
            near = nearest(scale.corpus, KNOWN)
            raise UserError(
                f"{source}: scale '{size}' names an unknown corpus '{scale.corpus}'{near}; known: {', '.join(KNOWN)}"
            )
        for name, prepared in scale.questions.items():
            command, *words = prepared.prepare or ("prepare-answers",)
            if command not in _PREPARING:
                raise UserError(
                    f"{source}: questions '{name}' of scale '{size}' are prepared by '{command}'"
                    f"{nearest(command, _PREPARING)}: name {' or '.join(_PREPARING)}"
                )
            sets = itertools.takewhile(lambda word: not word.startswith("-"), words)
            for one in sets if command == "prepare-answers" else ():
                if one not in benchmarks.names():
                    raise UserError(
                        f"{source}: questions '{name}' of scale '{size}' are of an unknown set '{one}'"
                        f"{nearest(one, benchmarks.names())}; known: {', '.join(benchmarks.names())}"
                    )


def _some(name: str) -> str:
    """As many recipes as fit into a line, those first whose names are alike."""
    near = difflib.get_close_matches(name, names(), n=_SHOWN, cutoff=0.5)
    found = list(dict.fromkeys([*near, *names()]))
    more = f" … ({len(found)} in all: fairseq-rpe sweep --help)" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _read(name: str) -> tuple[Path, dict[str, object]]:
    """The file of a recipe, and its text with what it takes over from its base, that one's base, and so on."""
    first, texts, seen = _path(name), list[dict[str, object]](), set[Path]()
    path: Path | None = first
    while path is not None:
        if (place := path.resolve()) in seen:
            raise UserError(f"recipe {path} is its own base: drop one of the base lines")
        seen.add(place)
        text = _toml(path)
        base = text.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UserError(f"recipe {path}: base must be the name of a recipe, not {reprlib.repr(base)}")
        texts.append(text)
        path = None if base is None else _path(str(path.parent / base) if base.endswith(".toml") else base)
    whole: dict[str, object] = {}
    try:
        for text in reversed(texts):
            whole = _over(whole, text)
            if "published" in text:  # it belongs to one experiment; everything else is a change of single keys
                whole["published"] = text["published"]
    except RecursionError:
        raise UserError(f"recipe {first} is nested too deep: write it flatter") from None
    return first, whole


def _path(name: str) -> Path:
    """The file of a recipe. Raises UserError: there is none."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.is_file():
        return path
    if name.endswith(".toml"):
        raise UserError(f"--recipe {name} {'is not a file' if os.path.lexists(path) else 'does not exist'}")
    raise UserError(f"unknown recipe '{name}'{nearest(name, names())}; known: {_some(name)}, or FILE.toml")


def _toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"recipe {path} is not TOML: {error}") from None


def _over(under: dict[str, object], text: dict[str, object]) -> dict[str, object]:
    """``under`` with the keys of ``text`` in their place, tables key by key."""
    both = dict(under)
    for key, value in text.items():
        there = both.get(key)
        both[key] = _over(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return both
