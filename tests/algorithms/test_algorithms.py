"""Algorithmic tasks: their examples, the fairseq task and criterion on them, decoding, and frozen positions."""

from __future__ import annotations

import copy
import math
import string
from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch
from conftest import make_model
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from refusal import refused
from torch.nn import functional as F

import fairseq_rpe.models  # noqa: F401  (registers)
from fairseq_rpe.algorithms import SPLITS, build, describe, names, normalise
from fairseq_rpe.cli.main import main
from fairseq_rpe.criterions.answer_cross_entropy import AnswerCrossEntropy
from fairseq_rpe.decoder.generation import greedy_steps
from fairseq_rpe.positions import build as build_positions
from fairseq_rpe.positions import freeze
from fairseq_rpe.positions.base import MAX_EXACT_POSITION
from fairseq_rpe.tasks.algorithmic import AlgorithmicConfig, AlgorithmicTask

COUNTS = {"train": 600, "valid": 200, "test": 600}
SIZES = "times=3,train=600,valid=200,test=600"
SPECS = {
    "copy": f"copy:items=6,alphabet=9,{SIZES}",
    "reverse": f"reverse:items=5,alphabet=70,{SIZES}",
    "sort": f"sort:items=6,alphabet=70,{SIZES}",
    "summation": f"summation:items=5,{SIZES}",
    "add_subtract": f"add_subtract:items=7,{SIZES}",
}
TINY = "copy:items=3,alphabet=12,train=400,valid=60,test=60,times=3"
PAD, EOS = 1, 2


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, list]]:
    """All examples of every task, by split."""
    return {name: {split: list(build(spec).examples(split)) for split in SPLITS} for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def tiny():
    """The fairseq task of copying up to three items, with its splits loaded."""
    task = AlgorithmicTask.setup_task(AlgorithmicConfig(algorithm=TINY))
    for split in SPLITS:
        task.load_dataset(split)
    return task


@pytest.fixture(scope="module")
def criterion(tiny):
    return AnswerCrossEntropy(tiny)


@pytest.fixture(scope="module")
def half_trained(tiny, criterion):
    """A model that answers some examples of ``tiny`` and not others."""
    model = make_model(tiny, "rope").train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for start in range(0, 400, 10):
        loss, size, _ = criterion(model, batch(tiny, "train", range(start, start + 10)))
        optimizer.zero_grad()
        (loss / size).backward()
        optimizer.step()
    return model.eval()


def batch(task, split: str, indices) -> dict:
    data = task.dataset(split)
    return data.collater([data[i] for i in indices])


ORDER = {word: i for i, word in enumerate([*string.digits, *string.ascii_lowercase, *string.ascii_uppercase])}


def rank(word: str) -> int:
    """The place of an item in the alphabet: digits, small letters, capitals, then x62, x63 …"""
    return ORDER[word] if len(word) == 1 else int(word.removeprefix("x"))


def solve(name: str, text: str) -> tuple[list[str], int, list[int]]:
    """Answer, number of items and intermediate results, from nothing but the text of a prompt."""
    verb, *words, end = text.split(" ")
    assert end == "[SEP]"
    if name in ("copy", "reverse", "sort"):
        assert verb == name.capitalize() + ":"
        by_name = {"copy": words, "reverse": [*reversed(words)], "sort": sorted(words, key=rank)}
        return by_name[name], len(words), []
    assert verb == "Compute:" and len(words) % 2 == 1
    results = [int(words[0])]
    for sign, digit in zip(words[1::2], words[2::2], strict=True):
        assert sign in "+-" and len(digit) == 1
        results.append(results[-1] + int(sign + digit))
    return [str(results[-1] % 10 if name == "summation" else results[-1])], len(results), results


def test_every_task_is_here_and_says_what_it_is(capsys):
    assert set(names()) > set(SPECS)
    assert main(["list", "--algorithms"]) == 0
    shown = capsys.readouterr().out
    for row in describe():
        assert row.summary and row.formula and row.paper and all(o.help for o in row.options)
        assert all(text in shown for text in (f"{row.name}: {row.summary}", row.formula, row.paper))


@pytest.mark.parametrize("name", SPECS)
def test_answers_are_right_words_closed_and_tokens_counted(name, made):
    task, used = build(SPECS[name]), set()
    for split in SPLITS:
        for example in made[name][split]:
            answer, items, results = solve(name, " ".join(example.prompt))
            assert list(example.answer) == answer and example.length == items, example
            assert task.num_tokens(example.length) == len(example.prompt) + len(example.answer)
            used |= {*example.prompt, *example.answer}
            if name == "add_subtract":
                assert all(0 <= r <= 9 for r in results) and all(a != b for a, b in pairwise(results))
            if name == "summation":
                assert all(1 <= b - a <= 9 for a, b in pairwise([0, *results]))
    assert len(set(task.vocabulary())) == len(task.vocabulary()) and used == set(task.vocabulary())


@pytest.mark.parametrize("name", SPECS)
def test_examples_follow_from_the_spec_alone_and_no_prompt_is_in_two_splits(name, made):
    task, seeded = build(SPECS[name]), build(f"{SPECS[name]},seed=2")
    other = {split: list(seeded.examples(split)) for split in SPLITS}
    assert all([e.length for e in other[split]] != [e.length for e in made[name][split]] for split in SPLITS)
    again = [list(task.examples(split)) for split in ("valid", "valid", "train")]
    assert again == [made[name][split] for split in ("valid", "valid", "train")]
    assert task.spec == normalise(SPECS[name]) and list(build(task.spec).examples("test")) == made[name]["test"]
    prompts, others = ({s: {e.prompt for e in of[s]} for s in SPLITS} for of in (made[name], other))
    for one, two in permutations(SPLITS, 2):
        assert not prompts[one] & (prompts[two] | others[two])  # of another seed either
    assert any(len(p) <= max(map(len, prompts["train"])) for p in prompts["test"])
    assert sum(e.length > task.config.items for e in made[name]["test"]) > 260


@pytest.mark.parametrize("name", SPECS)
def test_numbers_and_lengths(name, made):
    """As many examples as the spec says; every number of items in its range about equally often."""
    task = build(SPECS[name])
    for split, wanted in COUNTS.items():
        longest = task.config.items * (3 if split == "test" else 1)
        assert task.max_length(split) == longest
        counts, kinds = Counter(e.length for e in made[name][split]), longest - 1
        assert sorted(counts) == list(range(2, longest + 1)) and sum(counts.values()) == wanted
        spread = sum((count - wanted / kinds) ** 2 * kinds / wanted for count in counts.values())
        assert spread < kinds - 1 + 5 * math.sqrt(2 * (kinds - 1))  # chi-square: its variance is twice its mean


def test_the_fewest_items():
    """They are drawn from there on; where nobody asks, from 2, and the spec is what it always was."""
    few = build("copy:items=6,least=4,train=200,test=300")
    assert few.lengths("train") == [4, 5, 6] and few.lengths("test") == list(range(4, 31))
    assert build("sort:items=4,least=1,train=200").lengths("train") == [1, 2, 3, 4]
    assert build("copy:least=2").spec == "copy"


@pytest.mark.parametrize("size", [62, 63, 1000])
def test_alphabets_of_any_size_have_no_word_twice(size):
    for name in ("copy", "reverse", "sort"):
        words = build(f"{name}:alphabet={size}").vocabulary()
        assert len(words) == len(set(words)) == size + 2 and not any(" " in w or not w for w in words)
        assert [rank(w) for w in words[2:]] == list(range(size))


def test_steps_of_add_subtract_are_uniform(made):
    """From every digit each of the nine others is next equally often, and every digit is first equally often."""
    prompts = [solve("add_subtract", " ".join(e.prompt))[2] for e in made["add_subtract"]["test"]]
    first = Counter(results[0] for results in prompts)
    assert all(abs(first[digit] - 60) < 5 * math.sqrt(60) for digit in range(10))
    steps = Counter(pair for results in prompts for pair in pairwise(results))
    before = Counter(a for a, _ in steps.elements())
    assert len(steps) == 90
    assert all(abs(count - before[a] / 9) < 5 * math.sqrt(before[a] / 9) for (a, _), count in steps.items())


REFUSED = {
    "coppy": "unknown algorithmic task 'coppy' .did you mean 'copy'",
    **dict.fromkeys(("copy:items=0", "summation:items=1", "reverse:alphabet=1"), "must be at least 2, not"),
    "sort:items=two": "'items' of 'sort' wants a whole number, not 'two'",
    "copy:item=3": "'copy' has no option 'item' .did you mean 'items'",
    "summation:alphabet=5": "'summation' has no option 'alphabet'",
    **dict.fromkeys(("copy:times=0", "copy:train=0"), "must be at least 1"),
    "copy:seed=-1": "'seed' of 'copy' must be at least 0",
    "retrieval:key=16,items=200,least=60": "30.16 keys are 2.63 or more: lower key or alphabet",
    "copy:items=6,least=7": "least=7 is more than items=6, the most in training: lower least",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_is_refused(spec):
    with refused(REFUSED[spec]):
        build(spec)


def test_a_split_that_is_none_and_too_few_different_prompts_are_refused():
    """Two items of an alphabet of two make four prompts, all of which are for training."""
    with refused("split 'tset' does not exist.*train, valid, test"):
        next(build("copy").examples("tset"))
    task = build("copy:items=2,alphabet=2,train=50,valid=5,test=5,times=1")
    assert len({e.prompt for e in task.examples("train")}) == 4
    for split in ("valid", "test"):
        with refused(f"copy:items=2,times=1.*instances of 2 items belongs to the {split} split: raise alphabet"):
            list(task.examples(split))


def test_samples_show_prompt_and_answer_in_a_closed_vocabulary(tiny):
    data, words = tiny.dataset("test"), tiny.source_dictionary
    assert words is tiny.target_dictionary and (words.pad(), words.eos()) == (PAD, EOS)
    assert words.symbols[words.nspecial :] == build(TINY).vocabulary()
    with pytest.raises(KeyError):
        data.encode(("nonsense",))
    examples = list(build(TINY).examples("test"))
    assert len(data) == len(examples) == 60
    indices = [3, 0, 17, 5]
    sample = batch(tiny, "test", indices)
    source, target, answer = sample["net_input"]["src_tokens"], sample["target"], sample["answer"]
    sizes = [len(examples[i].prompt) + len(examples[i].answer) for i in indices]
    assert len(set(sizes)) > 1  # so that there is padding
    assert source.shape == target.shape == answer.shape == (4, max(sizes))
    assert (source.dtype, target.dtype, answer.dtype) == (torch.int64, torch.int64, torch.bool)
    assert sample["id"].tolist() == indices and sample["nsentences"] == 4
    assert sample["ntokens"] == sum(sizes) and sample["net_input"]["src_lengths"].tolist() == sizes
    for row, (i, n) in enumerate(zip(indices, sizes, strict=True)):
        prompt, said = list(examples[i].prompt), list(examples[i].answer)
        assert [words[t] for t in source[row, :n]] == prompt + said
        assert [words[t] for t in target[row, :n]] == prompt[1:] + said + ["</s>"]
        assert (source[row, n:] == PAD).all() and (target[row, n:] == PAD).all()
        assert [words[t] for t in target[row][answer[row]]] == [*said, "</s>"]
        assert answer[row].nonzero()[:, 0].tolist() == list(range(len(prompt) - 1, n))
        assert data.num_tokens(i) == data.size(i) == data.sizes[i] == n and data.items[i] == examples[i].length
    assert data.collater([]) == {}


def test_training_length_reaches_the_model(tiny):
    flags = f"--task rpe_algorithmic --algorithm {TINY} --arch transformer_rpe_lm_tiny --decoder-embed-dim 32"
    flags += " --decoder-ffn-embed-dim 64 --rpe rope --positions-train randomized:times=3 --positions-eval interpolate"
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=flags.split())
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    longest = max(len(e.prompt) + len(e.answer) for e in build(TINY).examples("train"))
    assert task.train_tokens == longest == 8
    model = task.build_model(cfg.model)
    assert cfg.model.rpe_train_length == cfg.model.tokens_per_sample == 8
    assert (
        model.decoder.position_transforms.train.max_length == 24
        and model.decoder.position_transforms.evaluation.length == 8
    )


@pytest.mark.parametrize("option", ["tokens_per_sample", "max_target_positions", "add_bos_token"])
def test_flags_without_effect_are_refused(option):
    with refused(f"--{option.replace('_', '-')} has no effect on rpe_algorithmic"):
        AlgorithmicTask.setup_task(AlgorithmicConfig(algorithm=TINY, **{option: 64}))


def by_hand(model, sample, examples) -> tuple[list[torch.Tensor], list[list[bool]]]:
    """-ln p of every answer token in reading order and, by row, whether it is the likeliest; the mask is not used."""
    scores = F.log_softmax(model(sample["net_input"]["src_tokens"])[0].double(), -1)
    words = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *build(TINY).vocabulary()])}
    losses, right = [], []
    for row, example in enumerate(examples):
        right.append([])
        for step, word in enumerate([*example.answer, "</s>"]):
            at = scores[row, len(example.prompt) - 1 + step]
            losses.append(-at[words[word]])
            right[row].append(int(at.argmax()) == words[word])
    return losses, right


def test_loss_is_the_cross_entropy_of_the_answers(tiny, criterion):
    sample = batch(tiny, "test", range(12))
    model = make_model(tiny, "kerple_log").train()
    loss, size, log = criterion(model, sample)
    each = criterion(model, sample, reduce=False)[0]
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    losses, right = by_hand(model, sample, tiny.dataset("test").examples[:12])
    assert each.shape == (size,)
    torch.testing.assert_close(each.double(), torch.stack(losses), rtol=1e-5, atol=1e-6)
    expected = torch.stack(losses).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert size == len(losses) == sum(map(len, right)) == log["sample_size"] == log["tokens"]
    assert any(p.grad.abs().max() > 0.1 for p in model.parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-5)
    assert log["loss"].item() == loss.item() and not log["loss"].requires_grad
    assert log["ntokens"] == sample["ntokens"] and log["nsentences"] == log["rows"] == 12
    assert "rpe_p_l0" in log and log["rpe_count"] == 1


def test_logged_accuracies(tiny, half_trained, criterion):
    logs, losses, right = [], [], []
    for part in (slice(0, 20), slice(20, 60)):
        sample = batch(tiny, "valid", range(60)[part])
        logs.append(criterion(half_trained, sample)[2])
        more = by_hand(half_trained, sample, tiny.dataset("valid").examples[part])
        losses, right = losses + more[0], right + more[1]
    tokens, rows = [r for row in right for r in row], [all(row) for row in right]
    assert 0 < sum(rows) < 60 and sum(tokens) > sum(rows)
    assert sum(int(log["right_tokens"]) for log in logs) == sum(tokens)
    assert sum(int(log["right_rows"]) for log in logs) == sum(rows)
    with metrics.aggregate() as seen:
        criterion.reduce_metrics(logs)
    values = seen.get_smoothed_values()
    assert values["loss"] == pytest.approx(sum(losses).item() / len(tokens) / math.log(2), abs=1e-4)
    assert values["accuracy"] == pytest.approx(100 * sum(tokens) / len(tokens), abs=0.01)
    assert values["exact"] == pytest.approx(100 * sum(rows) / 60, abs=0.01)
    assert criterion.logging_outputs_can_be_summed()


def test_criterion_refuses_what_it_cannot_score(tiny, criterion):
    sample = batch(tiny, "valid", range(3))
    model = make_model(tiny, "rope")
    with refused("needs examples with answers: use it with --task rpe_algorithmic"):
        criterion(model, {key: value for key, value in sample.items() if key != "answer"})
    adaptive = make_model(tiny, "rope", adaptive_softmax_cutoff="6,12", decoder_output_dim=32)
    with refused("--adaptive-softmax-cutoff"):
        criterion(adaptive, sample)


def tokens(rows: int, n: int) -> torch.Tensor:
    return torch.randint(4, 60, (rows, n), generator=generator(0))


@torch.no_grad()
def decode(model, x: torch.Tensor, *ends: int) -> torch.Tensor:
    """Logits of x (B, m), a piece up to each of ``ends`` at a time with the cache."""
    state, pieces = {}, []
    for start, end in pairwise((0, *ends)):
        pieces.append(model(x[:, :end], incremental_state=state)[0])
        assert pieces[-1].shape[1] == end - start
    return torch.cat(pieces, 1)


def answered(model, data) -> list[bool]:
    """Of every example, whether greedy decoding writes its answer."""
    right = [False] * len(data)
    for n in sorted(set(data.items.tolist())):
        rows = (data.items == n).nonzero()[0].tolist()
        prompts, answers = data.prompts(rows)
        for i, written, answer in zip(rows, greedy_steps(model, prompts, answers.shape[1]), answers, strict=True):
            right[i] = written.tolist() == answer.tolist()
    return right


def test_exact_counts_the_rows_that_greedy_decoding_gets_right(tiny, half_trained, criterion):
    """Padding is never the answer: decoding leaves it out, and so must ``exact``."""
    padder = copy.deepcopy(half_trained)
    weight = torch.nn.Parameter(padder.decoder.output_projection.weight.detach().clone())
    padder.decoder.output_projection.weight = weight  # apart from the embedding
    with torch.no_grad():
        weight[PAD] = 1.1 * weight[EOS]  # likelier than the end wherever that is likely
    for model in (half_trained, padder):
        right = answered(model, tiny.dataset("valid"))
        assert 0 < sum(right) < 60
        assert int(criterion(model, batch(tiny, "valid", range(60)))[2]["right_rows"]) == sum(right)
    right = answered(half_trained, tiny.dataset("valid"))
    each = [criterion(half_trained, batch(tiny, "valid", [i]))[2]["right_rows"] for i in range(60)]
    assert [bool(one) for one in each] == right


FROZEN = [
    "interpolate:train=6",
    "randomized:max_position=80",
    "randomized:max_position=80,per=row",
    "warp:head=0,tail=1",
    "offset:tokens=4",
]


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("moved", "spec"),
    [*((moved, "rope") for moved in FROZEN), *((moved, "sinusoidal") for moved in FROZEN[::4]), (FROZEN[2], "fire")],
)
def test_decoding_with_frozen_positions_equals_the_full_forward(task, spec, moved):
    model, x = make_model(task, spec), tokens(3, 20)
    model.decoder.position_transforms.evaluation = freeze(build_positions(moved), 20, generator())
    with torch.no_grad():
        full, plain = model(x)[0], make_model(task, spec)(x)[0]
    if moved != "offset:tokens=4" or spec == "sinusoidal":
        assert not torch.allclose(full, plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(decode(model, x, *range(9, 21)), full, rtol=1e-4, atol=1e-5)
    if (moved, spec) == ("interpolate:train=6", "rope"):  # not frozen, the ratio follows the text
        moving = make_model(task, spec, positions_eval=moved)
        with torch.no_grad():
            torch.testing.assert_close(moving(x)[0], full, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(decode(moving, x, *range(9, 21)), full, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("moved", FROZEN)
def test_frozen_positions_are_those_of_one_row(moved):
    transform, index = build_positions(moved), torch.arange(20, dtype=torch.float32)[None]
    frozen, sizes = freeze(transform, 20, generator()), torch.tensor([20])
    expected = transform(index.double(), sizes, generator()).k.float()
    assert not frozen.random and frozen.fractional == transform.fractional
    for lengths in (sizes, torch.tensor([7, 20, 1])):
        got = frozen(index, lengths)
        assert got.k.dtype == torch.float32 and torch.equal(got.k, expected)
    # shorter rows keep the places of their tokens
    assert torch.equal(frozen(index[:, :5], torch.tensor([5])).k, expected[:, :5])
    if transform.random and not moved.startswith("warp"):
        assert not torch.equal(freeze(transform, 20, generator(4))(index, sizes).k, expected)


def test_frozen_positions_refuse_what_does_not_fit(task):
    model = make_model(task, "rope")
    model.decoder.position_transforms.evaluation = freeze(build_positions("interpolate:train=6"), 20)
    with refused("a row of 21 tokens .* the 20 frozen positions"):
        model(tokens(1, 21))
    with refused("pass a generator"):
        freeze(build_positions("randomized:max_position=50"), 20)
    with refused("'randomized' is 15 but a row has 20 tokens"):
        freeze(build_positions("randomized:max_position=15"), 20, generator())


def test_randomized_times_is_so_many_training_lengths():
    index, lengths = torch.arange(10, dtype=torch.float32)[None], torch.full((500,), 10)
    by_times, by_max = (build_positions(f"randomized:{size},per=row", 10) for size in ("times=4", "max_position=40"))
    k = by_times(index, lengths, generator()).k
    assert by_times.max_length == 40 and k.min() == 0 and k.max() == 39 and (k.diff(dim=1) > 0).all()
    assert torch.equal(by_max(index, lengths, generator()).k, k)
    assert torch.equal(build_positions("randomized:times=1", 10)(index, lengths, generator()).k, index)
    assert build_positions("randomized", 10).max_length == build_positions("randomized").max_length == 2048


def test_randomized_times_refusals():
    with refused("needs a training length, unknown here: give max_position=NUMBER"):
        build_positions("randomized:times=4")
    with refused("'times' of 'randomized' must be at least 1"):
        build_positions("randomized:times=0", 10)
    with refused(f"'randomized:times={MAX_EXACT_POSITION}' is more than {MAX_EXACT_POSITION} positions: lower times"):
        build_positions(f"randomized:times={MAX_EXACT_POSITION}", 2)
    for tokens, least in ((50, 5), (51, 6)):
        index, sizes = torch.arange(tokens, dtype=torch.float32)[None], torch.tensor([tokens])
        with refused(rf"option 'times'.* 40 positions.*{tokens} tokens.*at least {least}\b"):
            build_positions("randomized:times=4", 10)(index, sizes, generator())
        enough = build_positions(f"randomized:times={least}", 10)
        assert enough(index, sizes, generator()).k.max() < enough.max_length
