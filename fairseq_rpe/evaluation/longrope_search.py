"""The search for LongRoPE's factors: candidates evolve, judged by the perplexity of a trained model on longer text.

Ding et al. 2024 (arXiv 2402.13753). Sizes, rates and the range of factors are those of the authors' code, from 1 to
1 + s for s times the trained length (the paper: 1.25·s); start tokens are the paper's, which that code leaves out.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import canonical
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.longrope import SEEDS, LongRope, seed_factors
from fairseq_rpe.encodings.rope import Rope
from fairseq_rpe.evaluation.loading import check_plain, load, one_line, read_stream
from fairseq_rpe.evaluation.loss_aggregation import MOST_BITS, defined, too_large
from fairseq_rpe.evaluation.perplexity import by_position
from fairseq_rpe.evaluation.records import BATCH_TOKENS, Overrides, Result, read
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import Checkpoint
from fairseq_rpe.utils import files
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import Count, Loss, Perplexity, filled

STEP = 100  # factors are whole hundredths
STARTS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
CHANGED, CROSSED, TRIES = 0.3, 0.3, 20  # of each factor, from the second parent, to find a candidate that is new
SMALLEST = 4


@dataclass(frozen=True, kw_only=True)
class CandidateKey:
    """What a loss is of; ``checkpoint`` and ``data`` are digests, ``rpe`` the candidate, ``samples`` blocks of text."""

    checkpoint: str
    data: str
    subset: str
    rpe: str
    compute_dtype: str | None = None
    tokens: Count
    samples: Count


@dataclass(frozen=True, kw_only=True)
class CandidateResult(CandidateKey, Result):
    """The perplexity per token, and its logarithm in bits, over ``samples`` blocks of ``tokens``."""

    of = CandidateKey
    loss_base2: Loss
    ppl: Perplexity


@dataclass(frozen=True, kw_only=True)
class SearchRequest(Overrides):
    """What is searched: the options of ``fairseq-rpe longrope-search``.

    ``tokens``: the length to read; ``samples`` blocks of it, the first of ``subset``, judge a candidate; ``attention``:
    the option of ``longrope`` that all candidates have; ``out``: what is measured, kept for a rerun.
    """

    checkpoint: Path
    data: Path
    tokens: int
    subset: str = "valid"
    samples: int = 5
    population: int = 64
    iterations: int = 40
    seed: int = 1
    attention: str = "sqrt"
    out: Path | None = None
    log: Path | None = None


class Candidate(NamedTuple):
    """Factors in hundredths, one for each pair, and how many start tokens keep their own angle."""

    factors: tuple[int, ...]
    start: int


Judge = Callable[[Candidate], float]


@dataclass(frozen=True)
class Space:
    """Candidates for reading ``scale`` times the trained length: factors from 1 to 1 + scale that never shrink."""

    scale: float
    starts: tuple[int, ...] = STARTS

    @property
    def top(self) -> int:
        return round(STEP * (1 + self.scale))

    def rounded(self, factors: tuple[float, ...]) -> Candidate:
        return Candidate(tuple(min(max(round(STEP * x), STEP), self.top) for x in factors), 0)

    def mutated(self, one: Candidate, draw: random.Random) -> Candidate:
        """Some factors drawn anew between their neighbours, which therefore never shrink; perhaps another start."""
        found = [STEP, *one.factors, self.top]
        for s in draw.sample(range(1, len(found) - 1), len(one.factors)):
            if draw.random() < CHANGED:
                found[s] = draw.randint(found[s - 1], found[s + 1])
        start = draw.choice(self.starts) if draw.random() < CHANGED else one.start
        return Candidate(tuple(found[1:-1]), start)

    def crossed(self, one: Candidate, other: Candidate, draw: random.Random) -> Candidate:
        """Some factors and perhaps the start of another; what would shrink is raised to the factor before it."""
        mixed = (b if draw.random() < CROSSED else a for a, b in zip(one.factors, other.factors, strict=True))
        return Candidate(tuple(itertools.accumulate(mixed, max)), draw.choice((one.start, other.start)))


def evolve(
    space: Space, seeds: list[Candidate], population: int, iterations: int, seed: int, judge: Judge
) -> Iterator[tuple[int, Candidate]]:
    """The best candidate so far after each iteration, 0 for the first population; ``judge``: the less the better.

    A quarter of a population are mutations and a quarter crossings of the better half, which stays. What comes out
    follows from ``seed`` and what ``judge`` says, whichever candidates were known to it before.
    """
    draw = random.Random(seed)
    seen, people = set(seeds), list(dict.fromkeys(seeds))

    def mutant(parents: list[Candidate]) -> Candidate:
        return space.mutated(draw.choice(parents), draw)

    def crossing(parents: list[Candidate]) -> Candidate:
        return space.crossed(*draw.sample(parents, 2), draw)

    def fresh(
        make: Callable[[list[Candidate]], Candidate], parents: list[Candidate], count: int
    ) -> Iterator[Candidate]:
        for _ in range(count):
            found = next((one for one in (make(parents) for _ in range(TRIES)) if one not in seen), None)
            if found is not None:
                seen.add(found)
                yield found

    people += fresh(mutant, seeds, population - len(people))
    for iteration in range(iterations + 1):
        people = sorted(people, key=lambda one: (judge(one), one))
        yield iteration, people[0]
        parents = people[: max(2, population // 2)]
        people = [*parents, *fresh(mutant, parents, population // 4)]
        people += fresh(crossing, parents, population // 4)


def search(request: SearchRequest) -> Iterator[str]:
    """Lines on how far it is; the last is the spec of the best candidate.

    Raises UserError: the checkpoint is not of plain ``rope``, was trained on ``tokens`` or more, or the text is short.
    """
    like, length = _checked(request)
    scale, own = request.tokens / length, like.config
    space = Space(scale, tuple(n for n in STARTS if n <= length))

    def spec(one: Candidate) -> str:
        factors = "+".join(f"{x / STEP:g}" for x in one.factors)
        config = LongRope.Config(
            factors=factors,
            factor=scale,
            start_tokens=one.start,
            attention=request.attention,
            original_length=length,
            base=own.base,
            rotary_fraction=own.rotary_fraction,
            interleaved=own.interleaved,
        )
        return canonical("longrope", config)

    seeds = {name: space.rounded(seed_factors(name, scale, like)) for name in SEEDS}
    measured = _Measured(request, length)
    # judged more than once, measured once
    rounds = evolve(
        space, list(seeds.values()), request.population, request.iterations, request.seed, lambda c: measured(spec(c))
    )
    with Progress("longrope-search", "candidates", ends=True) as bar:
        measured.tick = bar.update
        for name, one in seeds.items():
            yield f"{name}: perplexity {2 ** measured(spec(one)):.4f}"
        for iteration, best in rounds:
            said = f"iteration {iteration} of {request.iterations}: perplexity {2 ** measured(spec(best)):.4f}"
            yield f"{said}, {len(measured.asked)} candidates"
            if iteration == request.iterations:
                break
    yield spec(best)


def _checked(request: SearchRequest) -> tuple[Rope, int]:
    """The encoding of the checkpoint and the length that it was trained on."""
    if request.population < SMALLEST:
        raise UserError(f"--population {request.population} is too few to choose from: give at least {SMALLEST}")
    checkpoint_file.check(request.checkpoint)
    checkpoint = checkpoints.load(request.checkpoint)
    check_plain(checkpoint)
    like = _plain_rope(checkpoint)
    length = checkpoint.train_length() or 0
    if length < 2:
        raise UserError(f"{request.checkpoint} does not say what length it was trained on: train it again")
    if request.tokens <= length:
        raise UserError(f"--tokens {request.tokens} is not above the trained length, {length}: name a longer one")
    corpus.check_text(request.data, request.subset)
    total = corpus.count_tokens(request.data, request.subset)
    if total < request.samples * request.tokens:
        raise UserError(
            f"{request.data}/{request.subset} has {total} tokens, less than {request.samples} blocks of "
            f"{request.tokens}: use more text or fewer --samples"
        )
    if request.out is not None:
        files.check_file("--out", request.out)
    return like, length


def _plain_rope(checkpoint: Checkpoint) -> Rope:
    cls, _, config = registry.resolve(checkpoint.encoding)
    usual = Rope.Config()
    kept = {"base": usual.base, "rotary_fraction": usual.rotary_fraction, "interleaved": usual.interleaved}
    if cls is not Rope or replace(config, **kept) != usual:
        raise UserError(
            f"{checkpoint.path} was trained with '{checkpoint.encoding}': the search is for rope without a scaling"
        )
    heads, width = (checkpoint.size(key) for key in ("decoder_attention_heads", "decoder_embed_dim"))
    made = build(checkpoint.encoding, heads, width, checkpoint.train_length())
    assert isinstance(made, Rope)
    return made


class _Measured:
    """Spec -> loss in bits: the known one, or one that is measured and kept; the model is loaded once it is needed."""

    def __init__(self, request: SearchRequest, length: int) -> None:
        self.request, self.length = request, length
        self.of = {"checkpoint": files.file_digest(request.checkpoint), "data": corpus.digest(request.data)}
        self.known = {one.key: one for one in (read(CandidateResult, request.out) if request.out else [])}
        self.asked: set[str] = set()
        self.tick: Callable[[int], Any] = lambda count: None
        self._model: Any = None

    def __call__(self, spec: str) -> float:
        key = filled(CandidateKey, self.request, **self.of, rpe=spec)
        if key not in self.known:
            with one_line(f"measuring {spec} failed", self.request.log):
                loss = self._loss(spec)
            found = filled(CandidateResult, key, encoding="rope", loss_base2=loss, ppl=2**loss)
            if self.request.out is not None:
                files.append_json_line(self.request.out, found.record())
            self.known[key] = found
        if spec not in self.asked:
            self.asked.add(spec)
            self.tick(1)
        return self.known[key].loss_base2

    def _loss(self, spec: str) -> float:
        request = self.request
        if self._model is None:
            self._model, task = load(request.checkpoint, request, request.data, request.log)
            dictionary, n = task.source_dictionary, request.samples * request.tokens
            stream = read_stream(request.data, request.subset, dictionary, n)
            self._pad = dictionary.pad()
            self._blocks = [x.view(request.samples, request.tokens) for x in (stream[:-1], stream[1:])]
        decoder = self._model.decoder
        old = decoder.encodings[0]
        made = build(spec, old.heads, old.width, self.length).to(next(self._model.parameters()).device)
        decoder.encodings, decoder.length_dependent = nn.ModuleList([made]).eval(), made.length_dependent
        rows = max(1, BATCH_TOKENS // request.tokens)
        batches = zip(*(x.split(rows) for x in self._blocks), strict=True)
        nats, count = by_position(self._model, batches, request.tokens, self._pad, lambda scored: None)
        loss = defined(nats.sum()) / int(count.sum()) / math.log(2)
        if loss >= MOST_BITS:
            raise too_large(loss)
        return loss
