"""Evolutionary search for LongRoPE's factors by the perplexity of a trained model on longer text.

Ding et al. 2024 (arXiv 2402.13753). Sizes, rates and the range of factors are those of the authors' code, from 1 to
1 + s for s times the trained length (the paper: 1.25·s); start tokens are the paper's, and are absent from that code.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern
from fairseq_rpe.core.spec import canonical
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.longrope import SEED_SCALINGS, LongRope, seed_factors
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.encodings.rope import Rope
from fairseq_rpe.evaluation.loading import check_language_model, load_model, one_line_errors, read_stream
from fairseq_rpe.evaluation.loss_aggregation import MAX_BITS, check_finite, too_large_error
from fairseq_rpe.evaluation.perplexity import TokenBatch, losses_by_position
from fairseq_rpe.evaluation.records import BATCH_TOKENS, EvalOverrides, Result, read_results
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.utils import files, json_files, output_checks
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import Count, Loss, Perplexity, from_attributes

STEP = 100  # factors are whole hundredths
# Candidate numbers of start tokens, the paper's search space.
STARTS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
MUTATION_RATE, CROSSOVER_RATE = 0.3, 0.3  # probabilities for each factor
MAX_TRIES = 20  # attempts to make a candidate that is new
MIN_POPULATION = 4


@dataclass(frozen=True, kw_only=True)
class CandidateKey:
    """Key of the loss of one candidate.

    Attributes:
        checkpoint: digest of the checkpoint.
        data: digest of the corpus.
        split: name of the scored split.
        rpe: spec of the candidate.
        compute_dtype: dtype in place of the checkpoint's.
        tokens: tokens of a block.
        samples: number of blocks.
    """

    checkpoint: str
    data: str
    split: str
    rpe: str
    compute_dtype: str | None = None
    tokens: Count
    samples: Count


@dataclass(frozen=True, kw_only=True)
class CandidateResult(CandidateKey, Result):
    """Perplexity of one candidate.

    Attributes:
        loss_base2: mean loss in bits per token.
        ppl: 2 ** ``loss_base2``.
    """

    key_type = CandidateKey
    loss_base2: Loss
    ppl: Perplexity


@dataclass(frozen=True, kw_only=True)
class SearchRequest(EvalOverrides):
    """A search: the options of ``fairseq-rpe longrope-search``.

    Attributes:
        checkpoint: checkpoint with plain ``rope``.
        data: binarised data folder.
        tokens: target length in tokens.
        split: name of the split to score.
        samples: number of blocks of ``tokens``, the first of the split, that score a candidate.
        population: candidates of a generation.
        iterations: number of generations after the first.
        seed: seed of the search.
        attention: the option ``attention`` of ``longrope`` for all candidates.
        out: JSON-lines file of the measured losses, reused by a rerun.
        log: log file, named in error messages.
    """

    checkpoint: Path
    data: Path
    tokens: int
    split: str = "valid"
    samples: int = 5
    population: int = 64
    iterations: int = 40
    seed: int = 1
    attention: str = "sqrt"
    out: Path | None = None
    log: Path | None = None


class Candidate(NamedTuple):
    """Factors in hundredths, one for each rotary pair, and the number of start tokens that keep their angles."""

    factors: tuple[int, ...]
    start: int


LossFunction = Callable[[Candidate], float]


@dataclass(frozen=True)
class SearchSpace:
    """Candidates for ``scale`` times the training length: non-decreasing factors from 1 to 1 + scale.

    Attributes:
        scale: target length / training length.
        starts: candidate numbers of start tokens.
    """

    scale: float
    starts: tuple[int, ...] = STARTS

    @property
    def max_factor(self) -> int:
        """Largest factor in hundredths."""
        return round(STEP * (1 + self.scale))

    def round_factors(self, factors: tuple[float, ...]) -> Candidate:
        """Return a candidate with the nearest factors in hundredths and no start tokens."""
        return Candidate(tuple(min(max(round(STEP * x), STEP), self.max_factor) for x in factors), 0)

    def mutate(self, parent: Candidate, rng: random.Random) -> Candidate:
        """Return a copy with random factors, each between its neighbours, and perhaps another start."""
        factors = [STEP, *parent.factors, self.max_factor]  # with the bounds, so that each factor has two neighbours
        for i in rng.sample(range(1, len(factors) - 1), len(parent.factors)):
            if rng.random() < MUTATION_RATE:
                factors[i] = rng.randint(factors[i - 1], factors[i + 1])
        start = rng.choice(self.starts) if rng.random() < MUTATION_RATE else parent.start
        return Candidate(tuple(factors[1:-1]), start)

    def crossover(self, first: Candidate, second: Candidate, rng: random.Random) -> Candidate:
        """Return a mixture of two candidates; a factor below the one before it is raised to that one."""
        mixed = (b if rng.random() < CROSSOVER_RATE else a for a, b in zip(first.factors, second.factors, strict=True))
        return Candidate(tuple(itertools.accumulate(mixed, max)), rng.choice((first.start, second.start)))


def evolve(
    space: SearchSpace,
    initial: list[Candidate],
    population: int,
    iterations: int,
    seed: int,
    loss_function: LossFunction,
) -> Iterator[tuple[int, Candidate]]:
    """Minimise the loss over candidates.

    The better half of a population survives; a quarter are its mutations and a quarter its crossovers. The outcome
    depends only on ``seed`` and the losses.

    Args:
        space: space of candidates.
        initial: first candidates.
        population: candidates of a generation.
        iterations: number of generations after the first.
        seed: seed of the random choices.
        loss_function: loss of a candidate.

    Yields:
        The iteration, from 0, and the best candidate so far.
    """
    rng = random.Random(seed)

    def mutate(parents: list[Candidate]) -> Candidate:
        return space.mutate(rng.choice(parents), rng)

    def cross(parents: list[Candidate]) -> Candidate:
        first, second = rng.sample(parents, 2)
        return space.crossover(first, second, rng)

    seen, candidates = set(initial), list(dict.fromkeys(initial))
    candidates += _make_new(mutate, initial, population - len(candidates), seen)
    for iteration in range(iterations + 1):
        # by the candidate, too, so that equal losses have one order
        candidates = sorted(candidates, key=lambda candidate: (loss_function(candidate), candidate))
        yield iteration, candidates[0]
        parents = candidates[: max(2, population // 2)]
        candidates = [*parents, *_make_new(mutate, parents, population // 4, seen)]
        candidates += _make_new(cross, parents, population // 4, seen)


def _make_new(
    make: Callable[[list[Candidate]], Candidate], parents: list[Candidate], count: int, seen: set[Candidate]
) -> Iterator[Candidate]:
    """Yield up to ``count`` candidates that are not in ``seen``, and add them to it.

    Fewer are made if ``MAX_TRIES`` attempts give none that is new.
    """
    for _ in range(count):
        attempts = (make(parents) for _ in range(MAX_TRIES))
        candidate = next((attempt for attempt in attempts if attempt not in seen), None)
        if candidate is not None:
            seen.add(candidate)
            yield candidate


def search_factors(request: SearchRequest) -> Iterator[str]:
    """Search the factors for a checkpoint.

    Args:
        request: checkpoint, text and options of the search.

    Yields:
        Lines on the progress; the last line is the spec of the best candidate.

    Raises:
        UserError: the checkpoint does not have plain ``rope``, was trained on ``tokens`` or more, or the text is too
            short.
    """
    rope, length = _check_request(request)
    scale = request.tokens / length
    space = SearchSpace(scale, tuple(n for n in STARTS if n <= length))

    def candidate_spec(candidate: Candidate) -> str:
        factors = "+".join(f"{x / STEP:g}" for x in candidate.factors)
        config = LongRope.Config(
            factors=factors,
            factor=scale,
            start_tokens=candidate.start,
            attention=request.attention,
            original_length=length,
            base=rope.config.base,
            rotary_fraction=rope.config.rotary_fraction,
            interleaved=rope.config.interleaved,
        )
        return canonical("longrope", config)

    initial = {name: space.round_factors(seed_factors(name, scale, rope)) for name in SEED_SCALINGS}
    losses = _CachedLosses(request, length)

    def loss_function(candidate: Candidate) -> float:
        return losses(candidate_spec(candidate))

    generations = evolve(
        space, list(initial.values()), request.population, request.iterations, request.seed, loss_function
    )
    with Progress("longrope-search", "candidates", ends=True) as bar:
        losses.on_candidate = bar.update
        for name, candidate in initial.items():
            yield f"{name}: perplexity {2 ** loss_function(candidate):.4f}"
        for iteration, best in generations:
            progress = f"iteration {iteration} of {request.iterations}: perplexity {2 ** loss_function(best):.4f}"
            yield f"{progress}, {len(losses.requested)} candidates"
            if iteration == request.iterations:
                break  # the generator would make another generation before it ends
    yield candidate_spec(best)


def _check_request(request: SearchRequest) -> tuple[Rope, int]:
    """Check the request; return the checkpoint's encoding and its training length."""
    if request.population < MIN_POPULATION:
        raise UserError(f"--population {request.population} is too small to select from: use at least {MIN_POPULATION}")
    checkpoint_file.check_file(request.checkpoint)
    checkpoint = checkpoints.load(request.checkpoint)
    check_language_model(checkpoint)
    rope = _plain_rope(checkpoint)
    length = checkpoint.train_length() or 0
    if length < 2:
        raise UserError(f"{request.checkpoint} does not record its training length: train it again")
    if request.tokens <= length:
        raise UserError(f"--tokens {request.tokens} is not above the training length, {length}: use a larger value")
    corpus.check_text_folder(request.data, request.split)
    total = corpus.count_tokens(request.data, request.split)
    if total < request.samples * request.tokens:
        raise UserError(
            f"{request.data}/{request.split} has {total} tokens, less than {request.samples} blocks of "
            f"{request.tokens}: use more text or fewer --samples"
        )
    if request.out is not None:
        output_checks.check_output_file("--out", request.out)
    return rope, length


def _plain_rope(checkpoint: RpeCheckpoint) -> Rope:
    """Return the encoding of a checkpoint with ``rope`` without scaling; raise UserError for another one."""
    if is_pattern(checkpoint.encoding):
        raise UserError(
            f"{checkpoint.path} was trained with '{checkpoint.encoding}', and longrope-search replaces one encoding of "
            "all layers: use a checkpoint with rope in all layers"
        )
    cls, _, config = registry.resolve(checkpoint.encoding)
    default = Rope.Config()
    allowed = {"base": default.base, "rotary_fraction": default.rotary_fraction, "interleaved": default.interleaved}
    if cls is not Rope or replace(config, **allowed) != default:
        raise UserError(
            f"{checkpoint.path} was trained with '{checkpoint.encoding}': use a checkpoint with rope without scaling"
        )
    heads, width = (checkpoint.integer_setting(key) for key in ("decoder_attention_heads", "decoder_embed_dim"))
    length, head_width = checkpoint.train_length(), checkpoint.head_width()
    encoding = build(checkpoint.encoding, heads, width, length, head_width=head_width)
    assert isinstance(encoding, Rope)
    return encoding


class _CachedLosses:
    """Maps a spec to its loss in bits, from ``out`` or measured; loads the model at the first measurement.

    Args:
        request: the search.
        length: training length of the checkpoint in tokens.

    Attributes:
        results: results by key, those in ``out`` included.
        requested: specs whose loss the search has requested.
        on_candidate: called with 1 at the first request of each spec.
    """

    def __init__(self, request: SearchRequest, length: int) -> None:
        self.request, self.length = request, length
        self.digests = {
            "checkpoint": files.sha256_of_files(request.checkpoint),
            "data": corpus.corpus_digest(request.data),
        }
        earlier = read_results(CandidateResult, request.out) if request.out else []
        self.results = {result.key: result for result in earlier}
        self.requested: set[str] = set()
        self.on_candidate: Callable[[int], Any] = lambda count: None
        self._model: Any = None

    def __call__(self, spec: str) -> float:
        key = from_attributes(CandidateKey, self.request, **self.digests, rpe=spec)
        if key not in self.results:
            with one_line_errors(f"measuring {spec} failed", self.request.log):
                loss = self._measure_loss(spec)
            result = from_attributes(CandidateResult, key, encoding="rope", loss_base2=loss, ppl=2**loss)
            if self.request.out is not None:
                json_files.append_json_line(self.request.out, result.to_json())
            self.results[key] = result
        if spec not in self.requested:
            self.requested.add(spec)
            self.on_candidate(1)
        return self.results[key].loss_base2

    def _measure_loss(self, spec: str) -> float:
        """Return the loss of a candidate in bits per token."""
        if self._model is None:
            self._load()
        self._replace_encoding(spec)
        rows = max(1, BATCH_TOKENS // self.request.tokens)
        batches = map(TokenBatch, self._inputs.split(rows), self._targets.split(rows))
        nats, count = losses_by_position(self._model, batches, self.request.tokens, self._pad, lambda scored: None)
        loss = check_finite(nats.sum()) / int(count.sum()) / math.log(2)
        if loss >= MAX_BITS:
            raise too_large_error(loss)
        return loss

    def _load(self) -> None:
        """Load the model, and the first ``samples`` blocks of the split."""
        request = self.request
        self._model, task = load_model(request.checkpoint, request, request.data, request.log)
        self._pad = task.source_dictionary.pad()
        stream = read_stream(request.data, request.split, task.source_dictionary, request.samples * request.tokens)
        shape = (request.samples, request.tokens)
        self._inputs, self._targets = stream[:-1].view(shape), stream[1:].view(shape)

    def _replace_encoding(self, spec: str) -> None:
        """Replace the encoding of the loaded model; rope has no parameters, so none are lost."""
        decoder = self._model.decoder
        previous = decoder.encodings[0]
        device = next(self._model.parameters()).device
        encoding = build(spec, previous.heads, previous.width, self.length).to(device)
        decoder.encodings = LayerEncodings([encoding], decoder.encodings.index).eval()
        decoder.length_dependent = encoding.length_dependent
