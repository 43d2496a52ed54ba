"""Records of text generation: prompts and their options, requests, and resumable results."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.evaluation.records import EvalOverrides, Result
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import read_input
from fairseq_rpe.utils.json_files import parse_json_object
from fairseq_rpe.utils.records import Count, Fraction, Natural, NonNegative, Positive, Rule

TEMPERATURE, TOP_P = 0.8, 0.95  # defaults for text
MAX_TOKENS = 200
_REMEDY = "correct it"
_TopP = Annotated[float, Rule(lambda v: 0 < v <= 1, "a number above 0 and at most 1")]
_Stop = Annotated[str, Rule(lambda v: bool(v), "text that is not empty")]
_Seed = Annotated[int, Rule(lambda v: 0 <= v < 1 << 63, "a whole number from 0 on")]
_SAMPLING = ("top_k", "top_p", "min_p", "seed", "samples")  # options without effect where nothing is drawn


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What a user says about the continuation of a prompt; None is the default.

    Attributes:
        max_tokens: most new tokens, an end symbol included.
        temperature: 0 is greedy.
        top_k: number of most likely tokens that remain.
        top_p: probability that the most likely tokens that remain have together.
        min_p: smallest share of the largest probability of a token that remains.
        samples: texts per prompt.
        seed: seed of all samples.
        stop: strings that end a text; the text ends before them.
        beam: width of beam search in place of sampling.
        repetition_penalty: factor that makes tokens less likely that the text has already.
    """

    max_tokens: Count | None = None
    temperature: NonNegative | None = None
    top_k: Count | None = None
    top_p: _TopP | None = None
    min_p: Fraction | None = None
    samples: Count | None = None
    seed: _Seed | None = None
    stop: tuple[_Stop, ...] = ()
    beam: Count | None = None
    repetition_penalty: Positive | None = None

    def explicit(self) -> Mapping[str, object]:
        """Return the options that the user states."""
        return {name: value for name, value in vars(self).items() if value not in (None, ())}

    def resolve(self, samples_by_default: bool, name: str = "") -> "ResolvedOptions":
        """Return the options with their defaults.

        Args:
            samples_by_default: whether the default is to sample, as for text, or to choose the most likely tokens.
            name: source of the options, for messages; "" for the command line.

        Raises:
            UserError: options exclude each other, or one has no effect.
        """
        where = f"{name}: " if name else ""
        flag = (lambda key: key) if name else (lambda key: "--" + key.replace("_", "-"))
        temperature = self.temperature
        if temperature is None:
            temperature = TEMPERATURE if samples_by_default and self.beam is None else 0.0
        if self.beam is not None:
            for key in (*_SAMPLING, "temperature", "repetition_penalty"):
                if key in self.explicit() and not (key == "temperature" and temperature == 0):
                    raise UserError(f"{where}{flag(key)} has no effect with {flag('beam')}: drop one of them")
        if temperature == 0:
            for key in _SAMPLING:
                if key in self.explicit():
                    raise UserError(
                        f"{where}{flag(key)} has no effect without sampling: drop it, or use {flag('temperature')} "
                        "above 0"
                    )
        top_p = self.top_p
        if top_p is None:
            top_p = TOP_P if temperature > 0 and samples_by_default else 1.0
        return ResolvedOptions(
            max_tokens=MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            temperature=temperature,
            top_k=self.top_k,
            top_p=top_p,
            min_p=self.min_p or 0.0,
            stop=self.stop,
            beam=self.beam,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions:
    """Options that determine a text, besides its prompt, the seed and the number of the sample.

    Attributes:
        max_tokens: most new tokens.
        temperature: 0 is greedy.
        top_k: number of most likely tokens that remain; None: all.
        top_p: probability that the tokens that remain have together; 1: all.
        min_p: smallest share of the largest probability; 0: all.
        stop: strings that end a text.
        beam: width of beam search; None: no beam search.
        repetition_penalty: 1: none.
    """

    max_tokens: Count
    temperature: NonNegative
    top_k: Count | None = None
    top_p: _TopP
    min_p: Fraction
    stop: tuple[_Stop, ...]
    beam: Count | None = None
    repetition_penalty: Positive


@dataclass(frozen=True, kw_only=True)
class _PromptLine(GenerationOptions):
    """A line of a file of prompts: the prompt, a name of the prompt, and options in place of the command's."""

    prompt: str
    id: str | None = None


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")  # options that may be whole numbers in JSON


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt.

    Attributes:
        text: the text that the model continues.
        source: where it comes from, for messages.
        options: its options.
        id: name that the user gives it, or None.
        has_own_options: whether a line of a file states some of the options.
    """

    text: str
    source: str
    options: GenerationOptions
    id: str | None = None
    has_own_options: bool = False


def read_prompts(
    texts: Sequence[str], prompt_file: Path | None, jsonl: Path | None, options: GenerationOptions
) -> list[Prompt]:
    """Read prompts from the one source that is given: arguments, a text file, JSON lines or standard input.

    A file of text, or standard input, is one prompt without its last line end.

    Args:
        texts: prompts of the command line; ``-`` is standard input.
        prompt_file: file that is one prompt.
        jsonl: file with a JSON object per line: ``prompt``, perhaps ``id``, and options of that prompt.
        options: options of the command line.

    Raises:
        UserError: there is no source or more than one; or a source cannot be read, has a wrong line or no prompt.
    """
    is_used = {"PROMPT": bool(texts), "--prompt-file": prompt_file is not None, "--jsonl": jsonl is not None}
    sources = [name for name, used in is_used.items() if used]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)} both give prompts: use one of them")
    if jsonl is not None:
        return _read_lines(jsonl, options)
    if prompt_file is not None:
        text = _decode(_read_file(prompt_file), f"--prompt-file {shorten_path(prompt_file)}")
        return [Prompt(text=_without_line_end(text), source="the prompt", options=options)]
    if not texts and (sys.stdin is None or sys.stdin.isatty()):
        raise UserError("there is no prompt: name one, or use --prompt-file, --jsonl or standard input")
    if list(texts).count("-") > 1:
        raise UserError("- stands for standard input, which is one prompt: name it once")
    return [
        Prompt(text=_argument(text), source=f"prompt {n}" if len(texts) > 1 else "the prompt", options=options)
        for n, text in enumerate(texts or ("-",), start=1)
    ]


def _argument(text: str) -> str:
    """Return the prompt that an argument stands for."""
    if text == "-":
        buffer = getattr(sys.stdin, "buffer", None)
        content = sys.stdin.read() if buffer is None else _decode(buffer.read(), "standard input")
        return _without_line_end(content)
    if any("\ud800" <= character <= "\udfff" for character in text):  # bytes of the command line that are not UTF-8
        raise UserError("a prompt on the command line is not UTF-8: use --prompt-file with a file in UTF-8")
    return text


def _without_line_end(text: str) -> str:
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _read_file(path: Path) -> bytes:
    try:
        return read_input(path)
    except FileNotFoundError:
        raise UserError(f"{shorten_path(path)} does not exist: name a file of prompts") from None


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{source} line {line} is not UTF-8: convert it") from None


def _read_lines(path: Path, options: GenerationOptions) -> list[Prompt]:
    """Read prompts from JSON lines; blank lines are left out."""
    prompts = []
    for number, content in enumerate(_read_file(path).split(b"\n"), start=1):
        if not content.strip():
            continue
        table = parse_json_object(content, path, _REMEDY, number)
        source = f"{path} line {number}"
        whole = {key: table[key] for key in _NUMBERS if type(table.get(key)) is int}
        table |= {key: float(value) for key, value in whole.items() if abs(value) < 1 << 53}
        line = records.read_record(_PromptLine, table, source, "the line")
        stated = {key: value for key, value in line.explicit().items() if key not in ("prompt", "id")}
        merged = records.from_attributes(GenerationOptions, options, **stated)
        prompts.append(
            Prompt(text=line.prompt, source=source, options=merged, id=line.id, has_own_options=bool(stated))
        )
    if not prompts:
        raise UserError(f"{path} has no prompt: write a JSON object with prompt on each line")
    return prompts


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(EvalOverrides):
    """Texts that a checkpoint generates: the options of ``fairseq-rpe generate`` besides those of prompts.

    Attributes:
        checkpoint: checkpoint file.
        data: folder with the dictionary and the tokenizer; None: that of the training.
        out: JSON-lines file of results, or None.
        batch: rows that are generated together; None: as many as the memory allows, at most 16.
        logprobs: whether results have the log-probabilities of their tokens.
        echo: whether results have their prompts.
        log: log file, named in error messages.
    """

    checkpoint: Path
    data: Path | None = None
    out: Path | None = None
    batch: int | None = None
    logprobs: bool = False
    echo: bool = True
    log: Path | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationKey:
    """Key of one generated text.

    Attributes:
        index: number of the prompt in its source, from 0.
        prompt_digest: SHA-256 of the prompt.
        sample: number of the sample, from 0.
        seed: seed of the samples; None if nothing is drawn.
        options: options of the generation.
        checkpoint: digest of the checkpoint.
        rpe: encoding in place of the checkpoint's.
        module: digest of the file of ``--rpe-module``, which may define the encoding.
        positions: position transform in place of the checkpoint's.
        compute_dtype: dtype in place of the checkpoint's.
    """

    index: Natural
    prompt_digest: str
    sample: Natural = 0
    seed: _Seed | None = None
    options: ResolvedOptions
    checkpoint: str
    rpe: str | None = None
    module: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationResult(GenerationKey, Result):
    """One generated text.

    Attributes:
        id: name of the prompt, or None.
        prompt: the prompt, or None if it was left out.
        text: the continuation, without a stop string.
        stop: ``end`` after the end symbol, ``string`` before a stop string, ``length`` after ``max_tokens`` tokens.
        tokens: ids of all generated tokens, those of an end symbol or a stop string included.
        logprobs: log-probability in nats of each of ``tokens`` in the model's own distribution, without temperature,
            filters and penalty; None if not requested.
        prompt_tokens: number of tokens that the model read before the first generated one.
    """

    key_type = GenerationKey
    id: str | None = None
    prompt: str | None = None
    text: str
    stop: Literal["end", "string", "length"]
    tokens: tuple[Natural, ...]
    logprobs: tuple[float, ...] | None = None
    prompt_tokens: Count

    def to_json(self) -> dict[str, object]:
        """Return the fields that are not None, those that most readers need first."""
        table = super().to_json()
        first = [key for key in _FIRST_FIELDS if key in table]
        return {key: table[key] for key in (*first, *(key for key in table if key not in first))}


_FIRST_FIELDS = ("index", "id", "sample", "prompt", "text", "stop", "tokens", "logprobs", "prompt_tokens", "seed")


def stored_results(
    path: Path, keys: Sequence[GenerationKey], logprobs: bool
) -> Mapping[GenerationKey, GenerationResult]:
    """Return the results of a file for some keys.

    Args:
        path: JSON-lines file, which need not exist.
        keys: keys of the requested results.
        logprobs: whether only results with log-probabilities count.

    Raises:
        UserError: a line is damaged or no result of generation.
    """
    requested = set(keys)
    results = {}
    for result in records.read_records(GenerationResult, path, "the text"):
        key = result.key
        if key in requested and (result.logprobs is not None or not logprobs):
            results[key] = result
    return results
