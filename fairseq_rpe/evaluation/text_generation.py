"""Continues prompts by sampling, greedily or by beam search, with models of text, generated tasks and questions."""

import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fairseq_rpe import algorithms
from fairseq_rpe.checkpoints.checkpoint import check_vocabulary
from fairseq_rpe.core.errors import UserError, shorten_path
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.data.text_codec import IncrementalText, SymbolCodec, TextCodec, TokenDecoder, load_codec
from fairseq_rpe.data.tokenization import EOS, UNK
from fairseq_rpe.decoder.beam_search import beam_search
from fairseq_rpe.decoder.generation import check_length_independent, token_logprobs
from fairseq_rpe.decoder.sampling import SampledRow, SamplingConfig, sample_rows
from fairseq_rpe.evaluation.checkpoint_defaults import position_limits
from fairseq_rpe.evaluation.generation_records import (
    GenerationKey,
    GenerationRequest,
    GenerationResult,
    Prompt,
    ResolvedOptions,
    stored_results,
)
from fairseq_rpe.evaluation.loading import check_language_model, load_model
from fairseq_rpe.positions.position_transforms import seeded_generator
from fairseq_rpe.questions.dataset import read_question_manifest
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.utils import files, json_files, output_checks

Kind = Literal["text", "task", "questions"]
# Limits of a batch if the user gives none; a single row may exceed them.
_MAX_ROWS, _MAX_TOKENS = 16, 1 << 14
_PREFILL_TOKENS = 1 << 12  # tokens of the prompts that a pass reads at once

OnText = Callable[[int, str], object]  # called with the number of a row and text that it certainly has
OnResult = Callable[[int, GenerationResult], object]  # called with the number of a row and its result, in order


@dataclass
class GenerationStats:
    """Tokens and seconds of a generation; a decode step reads one token of each row.

    Attributes:
        rows: number of generated texts.
        tokens: number of generated tokens.
        step_tokens: generated tokens of decode steps: all but the first of each row, which the prefill gives.
        step_seconds: duration of the decode steps.
        prompt_tokens: tokens of the prompts that were read.
        prompt_seconds: duration of the prefill.
    """

    rows: int = 0
    tokens: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0

    def __str__(self) -> str:
        """Describe the speed in one line."""
        texts = f"{self.rows} texts, " if self.rows > 1 else ""
        seconds = self.prompt_seconds + self.step_seconds
        line = f"{texts}{self.tokens:,} tokens in {seconds:.2f} s"
        if self.step_tokens and self.step_seconds > 0:
            line += f", {self.step_tokens / self.step_seconds:,.1f} tokens/s"
        return f"{line} after {self.prompt_tokens:,} tokens of prompts in {self.prompt_seconds:.2f} s"


@dataclass
class _Row:
    """A text that is being generated.

    Attributes:
        number: number among all rows, from 0.
        key: key of the result.
        prompt: the prompt.
        ids: tokens of the prompt.
        decoder: decoder of the new tokens.
        text: text so far.
        tokens: generated tokens.
        logprobs: their log-probabilities.
        stop: reason of the end; None if it has not ended.
    """

    number: int
    key: GenerationKey
    prompt: Prompt
    ids: list[int]
    decoder: TokenDecoder
    text: IncrementalText
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Literal["end", "string", "length"] | None = None

    @property
    def options(self) -> ResolvedOptions:
        return self.key.options

    @property
    def length(self) -> int:
        """Largest number of tokens of the prompt and its continuation."""
        return len(self.ids) + self.options.max_tokens


@dataclass(frozen=True)
class TextGenerator:
    """A checkpoint that continues prompts; the model is loaded when a text is missing in ``request.out``.

    Attributes:
        request: checkpoint, folder of the tokenizer, and what the generation replaces in the checkpoint.
        checkpoint: the loaded checkpoint.
        kind: text, a generated task or questions, whose answers end by ``</s>``.
        codec: prompts to token ids and back.
    """

    request: GenerationRequest
    checkpoint: RpeCheckpoint
    kind: Kind
    codec: TextCodec

    @classmethod
    def load(cls, request: GenerationRequest) -> "TextGenerator":
        """Load the checkpoint's settings and its tokenizer.

        Raises:
            UserError: the checkpoint cannot be used, or there is no tokenizer that fits it.
        """
        checkpoint = checkpoints.load(request.checkpoint)
        algorithm = checkpoint.task.get("algorithm")
        if algorithm:
            if request.data is not None:
                raise UserError("--data has no effect on a model of a generated task, which has no data: drop it")
            symbols = (*corpus.FAIRSEQ_SPECIALS, *algorithms.build(str(algorithm)).vocabulary())
            return cls(request, checkpoint, "task", SymbolCodec(symbols, is_closed=True))
        check_language_model(checkpoint)
        kind: Kind = "questions" if checkpoint.task.get("_name") == "rpe_answers" else "text"
        folder = _data_folder(request, checkpoint)
        symbols = tuple(corpus.read_dictionary(folder / "dict.txt"))
        check_vocabulary(checkpoint, symbols, folder)
        return cls(request, checkpoint, kind, load_codec(_tokenizer_kind(folder), folder))

    @property
    def end(self) -> int | None:
        """Id of the symbol that ends a text; None for text in which it is a newline."""
        return None if self.kind == "text" and self.codec.has_newline_symbol else EOS

    def generate(self, prompts: Sequence[Prompt], on_text: OnText, on_result: OnResult) -> GenerationStats:
        """Continue prompts; texts that ``request.out`` has already are not generated again.

        Args:
            prompts: the prompts; each has as many rows as it has samples, one after the other.
            on_text: called with text of a row as soon as it is certain. Rows of a batch alternate.
            on_result: called once for each row, in order; the result is stored in ``request.out`` by then.

        Returns:
            What was generated, and its duration.

        Raises:
            UserError: options contradict each other, a prompt cannot be encoded, has no positions or no tokens, or
                the model cannot decode token by token.
        """
        rows, stats = self._rows(prompts), GenerationStats()
        out = self.request.out
        if out is not None:
            output_checks.check_plain_file("--out", out)
        stored = stored_results(out, [row.key for row in rows], self.request.logprobs) if out is not None else {}
        missing = [row for row in rows if row.key not in stored]
        finished = {row.number: self._relabel(stored[row.key], row.prompt) for row in rows if row.key in stored}
        renamed = [
            replace(stored[row.key], id=row.prompt.id)
            for row in rows
            if row.key in stored and stored[row.key].id != row.prompt.id
        ]
        next_number = 0

        def emit(result: GenerationResult | None = None, number: int = -1) -> None:
            """Report the results in order, as far as there are any."""
            nonlocal next_number
            if result is not None:
                if out is not None:
                    json_files.append_json_line(out, result.to_json())
                finished[number] = result
            while next_number in finished:
                on_result(next_number, finished.pop(next_number))
                next_number += 1

        if out is not None and (missing or renamed):
            output_checks.check_output_file("--out", out)
            for result in renamed:  # the last line of a key counts
                json_files.append_json_line(out, result.to_json())
        emit()
        if not missing:
            return stats
        self._check_positions(missing)
        is_reported = self._report_length(max(len(row.ids) for row in missing), "a prompt has")
        model = self.load_model()
        for batch in self._batches(missing):
            _Batch(self, model, batch, stats, on_text, emit).run()
        if not is_reported:
            longest = max(len(row.ids) + len(row.tokens) for row in missing)
            self._report_length(longest, "a prompt and its text have")
        return stats

    def _relabel(self, result: GenerationResult, prompt: Prompt) -> GenerationResult:
        """Return a stored result with the name of its prompt, and with what the request shows."""
        return replace(
            result,
            id=prompt.id,
            prompt=prompt.text if self.request.echo else None,
            logprobs=result.logprobs if self.request.logprobs else None,
        )

    def load_model(self) -> Any:
        """Return the ``transformer_rpe_lm`` in evaluation mode, on its device.

        Raises:
            UserError: the checkpoint cannot be used, or the model cannot decode token by token.
        """
        threads = defaults_for(self.checkpoint.arch, algorithm=True).threads
        if threads and "OMP_NUM_THREADS" not in os.environ:
            # decoding single tokens of a small model: more threads would only wait for each other
            torch.set_num_threads(threads)
        data = None if self.kind == "task" else _data_folder(self.request, self.checkpoint)
        model, _ = load_model(self.request.checkpoint, self.request, data, self.request.log)
        check_length_independent(model)
        return model

    def _rows(self, prompts: Sequence[Prompt]) -> list[_Row]:
        """Return the rows of all prompts; raise UserError for wrong options and prompts."""
        rows: list[_Row] = []
        shared: dict[str, Any] = {
            "checkpoint": files.sha256_of_files(self.request.checkpoint),
            "rpe": self.request.rpe,
            "module": self.request.module,
            "positions": self.request.positions_eval,
            "compute_dtype": self.request.compute_dtype,
        }
        unknown = 0
        for index, prompt in enumerate(prompts):
            options = prompt.options.resolve(self.kind == "text", prompt.source if prompt.has_own_options else "")
            ids = self._encode(prompt)
            unknown += ids.count(UNK)
            digest = hashlib.sha256(prompt.text.encode()).hexdigest()
            seed = prompt.options.seed or (1 if prompt.options.seed is None else 0)
            for sample in range(prompt.options.samples or 1):
                key = GenerationKey(
                    index=index,
                    prompt_digest=digest,
                    sample=sample,
                    seed=seed if options.temperature > 0 else None,
                    options=options,
                    **shared,
                )
                text = IncrementalText(options.stop)
                rows.append(_Row(len(rows), key, prompt, ids, self.codec.decoder(ids), text))
        if unknown and isinstance(self.codec, SymbolCodec):
            print(f"{unknown} words of the prompts are not in the vocabulary: the model reads <unk>", file=sys.stderr)
        return rows

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens that the model reads: those of a text begin with ``</s>``, the end of the text before."""
        try:
            ids = self.codec.encode(prompt.text)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from None
        if self.kind == "text":
            return [EOS, *ids]
        if not ids:
            raise UserError(f"{prompt.source} is empty: a model of {self.kind} needs at least one token")
        return ids

    def _check_positions(self, rows: Sequence[_Row]) -> None:
        """Raise UserError for a row that would have more tokens than there are positions."""
        train_length = self.checkpoint.train_length() or 0
        transform = self.request.positions_eval or self.checkpoint.model.get("positions_eval")
        rpe = self.request.rpe or self.checkpoint.encoding
        limits = position_limits(rpe, str(transform) if transform else None, train_length)
        reason, limit = min(limits.items(), key=lambda item: item[1], default=("", math.inf))
        for row in rows:
            if row.length > limit:
                left = int(limit) - len(row.ids)
                remedy = f"give --max-tokens {left} or less" if left > 0 else "shorten the prompt"
                raise UserError(
                    f"{row.prompt.source} has {len(row.ids)} tokens and may get {row.options.max_tokens} new ones, "
                    f"but {reason}: {remedy}"
                )

    def _report_length(self, tokens: int, subject: str) -> bool:
        """Print a line if a text is longer than the texts of the training, and return whether it is."""
        train_length = self.checkpoint.train_length() or 0
        if not 0 < train_length < tokens:
            return False
        print(f"note: {subject} {tokens:,} tokens, the model was trained on {train_length:,}", file=sys.stderr)
        return True

    def _batches(self, rows: Sequence[_Row]) -> list[list[_Row]]:
        """Return batches of consecutive rows; those of a beam search have one width and one number of tokens."""
        batches: list[list[_Row]] = []
        for row in rows:
            if batches and _search(batches[-1][0]) == _search(row) and self._fits(batches[-1], row):
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _fits(self, batch: Sequence[_Row], row: _Row) -> bool:
        """Return whether a batch may have one more row."""
        if self.request.batch is not None:
            return len(batch) < self.request.batch
        width = row.options.beam or 1
        longest = max(row.length, *(other.length for other in batch))
        return (len(batch) + 1) * width <= _MAX_ROWS and (len(batch) + 1) * width * longest <= _MAX_TOKENS


def _search(row: _Row) -> tuple[int, int] | None:
    """Return the width and the number of tokens of a row's beam search, or None."""
    return None if row.options.beam is None else (row.options.beam, row.options.max_tokens)


@dataclass(frozen=True)
class _Batch:
    """Rows that are generated together.

    Attributes:
        generator: the checkpoint and its tokenizer.
        model: its model.
        rows: the rows.
        stats: statistics to which the batch adds its own.
        on_text: called with text of a row.
        emit: called with the result of a row and its number.
    """

    generator: TextGenerator
    model: Any
    rows: Sequence[_Row]
    stats: GenerationStats
    on_text: OnText
    emit: Callable[[GenerationResult, int], object]

    def run(self) -> None:
        """Generate the texts."""
        start = time.monotonic()
        if self.rows[0].options.beam is None:
            first_step = self._sample(start)
        else:
            first_step = self._beam_search(start)
        tokens = sum(len(row.tokens) for row in self.rows)
        self.stats.rows += len(self.rows)
        self.stats.tokens += tokens
        self.stats.step_tokens += tokens - len(self.rows)
        self.stats.prompt_tokens += sum(len(row.ids) for row in self.rows)
        self.stats.prompt_seconds += first_step - start
        self.stats.step_seconds += time.monotonic() - first_step

    def _sample(self, start: float) -> float:
        """Generate by sampling or greedily; return the time of the first tokens."""
        first_step = start
        needs_logprobs = self.generator.request.logprobs
        end = self.generator.end

        def add_token(n: int, token: int, logprob: float | None) -> bool:
            nonlocal first_step
            if first_step == start:
                first_step = time.monotonic()
            row = self.rows[n]
            if logprob is not None:
                row.logprobs.append(logprob)
            self._add_token(row, token, end)
            if row.stop is None and len(row.tokens) == row.options.max_tokens:
                row.stop = "length"
            if row.stop is not None:
                self._finish(row)
            return row.stop is not None

        sampled = [
            SampledRow(row.ids, row.options.max_tokens, _sampling_config(row.options), _generator(row))
            for row in self.rows
        ]
        sample_rows(self.model, sampled, add_token, end, needs_logprobs, _PREFILL_TOKENS)
        return first_step

    def _beam_search(self, start: float) -> float:
        """Generate by beam search, whose hypotheses end by ``</s>``; return the time of the start."""
        options = self.rows[0].options
        assert options.beam is not None
        beams = beam_search(self.model, [row.ids for row in self.rows], options.max_tokens, options.beam)
        for row, hypotheses in zip(self.rows, beams, strict=True):
            tokens = hypotheses[0].tokens if hypotheses else []
            is_complete = len(tokens) < options.max_tokens - 1  # otherwise the end was forced
            tokens = [*tokens, EOS] if is_complete else tokens
            for token in tokens:
                self._add_token(row, token, EOS)
                if row.stop is not None:
                    break
            row.stop = row.stop or "length"
            if self.generator.request.logprobs and row.tokens:
                row.logprobs += token_logprobs(self.model, row.ids, row.tokens, row.length)
            self._finish(row)
        return start

    def _add_token(self, row: _Row, token: int, end: int | None) -> None:
        """Add a token to a row, and set its ``stop`` if it ends there."""
        row.tokens.append(token)
        if token == end:
            row.stop = "end"
            return
        text = row.text.append(row.decoder.add(token))
        if row.text.is_stopped:
            row.stop = "string"
        if text:
            self.on_text(row.number, text)

    def _finish(self, row: _Row) -> None:
        """Report the rest of a row's text, and its result."""
        assert row.stop is not None
        text = "" if row.stop == "string" else row.text.append(row.decoder.finish()) + row.text.finish()
        if row.text.is_stopped:
            row.stop = "string"
        if text:
            self.on_text(row.number, text)
        request = self.generator.request
        result = GenerationResult(
            **vars(row.key),
            id=row.prompt.id,
            prompt=row.prompt.text if request.echo else None,
            text=row.text.text,
            stop=row.stop,
            tokens=tuple(row.tokens),
            logprobs=tuple(row.logprobs) if request.logprobs else None,
            prompt_tokens=len(row.ids),
            encoding=self.generator.checkpoint.encoding,
        )
        self.emit(result, row.number)


def _sampling_config(options: ResolvedOptions) -> SamplingConfig:
    return SamplingConfig(
        repetition_penalty=options.repetition_penalty,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
    )


def _generator(row: _Row) -> torch.Generator:
    """Return the generator of a row, seeded by the seed, the prompt and the number of the sample."""
    return seeded_generator("generate", row.key.seed, row.key.prompt_digest, row.key.sample)


def _data_folder(request: GenerationRequest, checkpoint: RpeCheckpoint) -> Path:
    """Return the folder of the dictionary and the tokenizer."""
    trained = checkpoint.task.get("data")
    if request.data is None and not trained:
        raise UserError(f"{checkpoint.path} does not record its data folder: name the folder with --data")
    # fairseq accepts several folders, separated by colons; all have the dictionary of the first
    folder = request.data or Path(str(trained).split(os.pathsep)[0])
    if not (folder / "dict.txt").is_file():
        missing = "has no dict.txt" if folder.is_dir() else "does not exist"
        raise UserError(f"the data folder {shorten_path(folder)} {missing}: name the folder of its text with --data")
    return folder


def _tokenizer_kind(folder: Path) -> str:
    """Return the kind of the tokenizer of a prepared folder: bpe, gpt2 or words."""
    manifest = corpus.read_manifest(folder) or read_question_manifest(folder)
    if not manifest:
        raise UserError(
            f"{shorten_path(folder)} has no tokenizer: it was not made by fairseq-rpe prepare or prepare-questions; "
            "prepare the text with one of these commands"
        )
    return str(manifest.get("tokenizer", {}).get("kind", "bpe"))
