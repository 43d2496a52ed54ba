"""Gaps in a text: which names there are, what is asked, how far back the answer stands, what a guess gets."""

import json
import random
import re

import numpy as np
import pytest
from prepared_folder import vocabulary
from refusal import refused

from fairseq_rpe.data.tokenization import load_encoder
from fairseq_rpe.questions import cloze
from fairseq_rpe.questions.cloze import BINS, BLANK, ClozeDocument, ClozeQuestion
from fairseq_rpe.questions.cloze_dataset import ClozeOptions, prepare_cloze
from fairseq_rpe.questions.cloze_variants import NEEDLE, NamePermutation, NeedleDocument, insert_needle

NAMES = ("Tamsin", "Bren", "Ula", "Ivo", "Sela", "Nils", "Oda", "Quill", "Orrin", "Marten", "Petra", "Hob")
SENTENCES = (
    "In the morning {} walked slowly down to the old mill by the river.",
    "“I have never seen the sea,” said {}, and nobody answered for a long while.",
    "Then {} and {} carried the grain up the hill before the rain came.",
    "The door of the barn, which {} had painted red,\nstood open all night.",
    "Nobody knew why Mrs. {} kept the lamp burning in the upper room.",
    "They talked of the harvest and of the price of bread until it was dark.",
)
SPLITS = ("train", "valid", "test")
WANTED = {"train": 40, "valid": 16, "test": 16}
WORDS = sorted({w for s in SENTENCES for w in s.replace("{}", "").split()} | set(NAMES) | {f"{n}," for n in NAMES})


def story(seed, sentences=400):
    draw = random.Random(seed)
    told = [draw.choice(SENTENCES) for _ in range(sentences)]
    # a few names at a time, so that others come back after a while
    casts = [draw.sample(NAMES, 5) for _ in range(1 + sentences // 40)]
    named = [sentence.format(*draw.sample(casts[i // 40], 2)) for i, sentence in enumerate(told)]
    return "\n\n".join(" ".join(named[i : i + 7]) for i in range(0, sentences, 7))


def write_stories(path, seeds, sentences=400):
    path.write_text("".join(json.dumps({"text": story(seed, sentences)}) + "\n" for seed in seeds))
    return path


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    words = {*WORDS, *(f"{name}." for name in NAMES), *NEEDLE.split(), BLANK, "="}
    return vocabulary(tmp_path_factory.mktemp("vocabulary"), "words", sorted(words))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for split, seeds in {"train": (1, 2), "valid": (3,), "test": (4,)}.items():
        write_stories(folder / f"{split}.jsonl", seeds)
    return folder


def make(texts, vocab, dest, said=None, **more):
    """A folder of gaps in the texts; ``said`` takes what is said."""
    files = {split: (texts / f"{split}.jsonl",) for split in SPLITS}
    given = {"tokens": 256, "questions": 40, "valid_questions": 16, **files, **more}
    return prepare_cloze(ClozeOptions(out=dest, vocab_from=vocab, **given), [].append if said is None else said.append)


@pytest.fixture(scope="module")
def usual(texts, vocab, tmp_path_factory):
    return make(texts, vocab, tmp_path_factory.mktemp("usual") / "gaps")


def read(texts, prepared, split):
    """The questions of a split, each with its text, the answer's place there and the passage's end."""
    stories = [json.loads(line)["text"] for line in open(texts / f"{split}.jsonl")]
    rows = prepared.split(split)
    numbers = [[int(number) for number in row.id.split("-")] for row in rows]
    return rows, [(row, stories[number], place, end) for row, (number, place, end) in zip(rows, numbers, strict=True)]


def encode(text):
    return np.zeros(len(text.split()), np.uint16)


def gaps_of(text, *how, shortest=None, encode=encode):
    """The gaps of passages of 256 tokens."""
    return list(ClozeDocument(text, encode, lambda name: True, *([shortest] if shortest else [])).questions(256, *how))


def test_names_are_capitalised_within_sentences_and_never_written_small():
    text = (
        "But Ivo saw Mr. Quill there. Hope is rare, said Quill, and Lady Sela agreed. Hope failed Ivo too, in hope. "
        "But on Monday old Lady Oda met Quill and Ivo again, as Lady Petra wished. Sela sat by New Orrin. "
    ) * 6
    found = ClozeDocument(text + "Mr. Hob, Mr. Ula. " * 6, encode, lambda name: name != "Petra").names
    # never within a sentence, or small as well, or before another name, or one that cannot be an answer
    assert not {"But", "Hope", "Lady", "New", "Petra"} & set(found) and {"Ivo", "Quill", "Sela", "Oda"} <= set(found)


def test_letters_of_a_longer_word_are_no_mention():
    text = (
        "Paul said that Jean-Paul went. " * 3 + "Then Paul's hat and Jean-Paul's hat fell on Paul-Henri. " * 3 + "‘No.’"
    )
    document = NeedleDocument("Paul. " + text, encode, lambda name: True)
    found = [text[word.end() :][:2] for word in re.finditer(r"(?<![-\w])Paul(?![-\w])", text)]
    assert document.name_counts()["Paul"] == len(found) + 1


@pytest.mark.parametrize(
    ("where", "form", "sentence"),
    [
        ("last", "gap", "next"),
        ("first", "gap", "earlier"),
        ("both", "gap", "next"),
        ("last", "completion", "earlier"),
        ("last", "completion", "next"),
    ],
)
def test_every_question_is_as_it_is_said_to_be(vocab, sentence, where, form):
    end = "" if form == "completion" else f"\n\n{BLANK} ="
    text, encode = story(7, 250), load_encoder("words", vocab).encode
    found = gaps_of(text, where, sentence, form, encode=encode)
    assert {name for gap in found for name in gap.choices} == set(NAMES)
    assert len(found) > 60 and {gap.distance_bin for gap in found} == set(range(BINS))
    for gap in found:
        passage = text[gap.passage_start : gap.passage_end]
        length = sum(len(encode(part)) for part in (gap.prompt, passage, gap.cue))
        assert 256 - cloze.ANSWER_TOKENS - 2 <= length <= 256 - cloze.ANSWER_TOKENS
        assert BLANK not in passage and passage == passage.strip()
        assert bool(gap.prompt) == (where != "last") and (len(gap.cue) < 10) == (where == "first")
        assert gap.cue.endswith(end) and gap.cue.startswith("\n\n")
        asked = (gap.prompt or gap.cue.removesuffix(end)).strip()
        assert asked.count(BLANK) == (form == "gap") and len(asked.split()) >= 4
        whole = asked.replace(BLANK, gap.answer) if form == "gap" else f"{asked} {gap.answer}"
        following = " ".join(text[gap.passage_end :].split())
        assert (whole in " ".join(passage.split())) if sentence == "earlier" else following.startswith(whole)
        assert gap.answer not in asked and text[gap.gap_start :].startswith(gap.answer)

        # the same by a plain look at the words
        words = passage.split()
        named = [(i, name) for i, word in enumerate(words) for name in NAMES if name in word]
        lasts = {name: i for i, name in named}
        counts = {name: sum(n == name for _, n in named) for name in lasts}
        place = len(text[gap.passage_start : gap.gap_start].split()) if sentence == "earlier" else lasts[gap.answer]
        assert gap.distance == len(words) - 1 - place
        assert gap.choices == tuple(dict.fromkeys(name for _, name in named))
        answer = gap.answer
        others = [name for name in lasts if name not in asked and name != answer]
        assert sum(lasts[n] > lasts[answer] or counts[n] >= counts[answer] for n in others) >= 3
        guesses = dict(gap.guesses)
        assert guesses.pop(cloze.RANDOM) in {*others, answer}
        assert guesses == {
            cloze.RECENT: max({*others, answer}, key=lasts.__getitem__),
            cloze.FREQUENT: max({*others, answer}, key=lambda n: (counts[n], lasts[n])),
        }


def test_words_beside_a_name_do_not_tell_it(vocab):
    text = story(8).replace("Ula ", "Ula Orrin ").replace("Nils", "Great Nils")
    found = gaps_of(text, "last", "next")
    asked = {gap.answer for gap in found}
    assert "Nils" not in asked and "Tamsin" in asked
    assert not any(re.search(f"{BLANK} [A-Z]|Great {BLANK}", gap.cue) for gap in found)


def test_a_folder_has_as_many_of_each_distance_and_says_what_a_guess_gets(texts, vocab, usual):
    encode, info = load_encoder("words", vocab).encode, usual.sets["gaps"]
    assert (info.suite, info.metrics, info.published) == ("gaps", ("f1", "em"), "f1")
    for split, wanted in WANTED.items():
        rows, found = read(texts, usual, split)
        assert len(rows) == wanted == info.splits[split].questions
        bins = [0] * BINS
        for row, text, place, end in found:
            words = re.findall(r"[ \n]*[^ \n]+", text[:end])
            back = len(encode("".join(words[len(words) - row.distance :])))
            bins[BINS * back // (256 - cloze.ANSWER_TOKENS - len(rows.tokens(row.cue)))] += 1
            assert text[place:].startswith(rows.text(row.answers[0]))
            assert " ".join(rows.text(row.document).split()) in " ".join(text.split())
        assert bins == [wanted // BINS] * BINS
        for guess, percent in info.splits[split].guesses.items():
            assert percent == 100 * sum(row.guesses[guess] in row.answers for row in rows) / wanted


@pytest.mark.parametrize(("sentence", "form"), [("earlier", "completion"), ("next", "gap")])
def test_exchanged_names_are_others_for_each_question(texts, vocab, tmp_path, sentence, form):
    more = {"entity_names": "exchanged", "source": sentence, "question_format": form}
    prepared, made_of = make(texts, vocab, tmp_path / "gaps", **more), set()
    for split in SPLITS:
        rows, found = read(texts, prepared, split)
        for row, text, place, end in found:
            assert len(rows.tokens(row.document)) + len(rows.tokens(row.cue)) <= 256 - cloze.ANSWER_TOKENS
            new = rows.text(row.document).split()
            old = text[:end].split()[-len(new) :]
            named = {(a, b) for a, b in zip(old, new, strict=True) if a != b}
            parts = [(re.search(r"[A-Z]\w+", a)[0], re.search(r"[A-Z]\w+", b)[0]) for a, b in named]
            assert all(b == a.replace(*pair) for (a, b), pair in zip(named, parts, strict=True))
            others = dict(parts)
            # each name has one other name, and no two have the same
            assert set(parts) == set(others.items()) and len(set(others.values())) == len(others)
            assert {*others, *others.values()} <= set(NAMES)
            answer = others[next(name for name in NAMES if text[place:].startswith(name))]
            assert rows.text(row.answers[0]) == answer
            assert {rows.text(item) for item in row.choices} == set(others.values())
            asked = rows.text(row.cue).replace(f"\n\n{BLANK} =", "").strip()
            assert sentence == "next" or f"{asked} {answer}" in " ".join(new)
            made_of.add(frozenset(others.items()))
    assert len(made_of) == sum(WANTED.values())
    again = make(texts, vocab, tmp_path / "again", **more)
    assert (again.folder / "train.bin").read_bytes() == (prepared.folder / "train.bin").read_bytes()


def test_a_planted_sentence_is_the_only_one_with_the_answer(texts, vocab, tmp_path):
    encode, answers = load_encoder("words", vocab).encode, set()
    prepared = make(texts, vocab, tmp_path / "gaps", source="planted", question_format="completion")
    for split, wanted in WANTED.items():
        rows, found = read(texts, prepared, split)
        bins, right = [0] * BINS, {cloze.RECENT: 0, cloze.RANDOM: 0}
        for row, text, place, end in found:
            shown, answer = rows.text(row.document), rows.text(row.answers[0])
            before, after = shown.split(f"{NEEDLE} {answer}. ")
            passage = (before + after).split()
            assert passage == text[:end].split()[-len(passage) :] and answer not in before + after
            assert after.split() == text[place:end].split() and len(after.split()) == row.distance
            assert rows.text(row.cue) == f"\n\n{NEEDLE}" and row.prompt is None
            named = {rows.text(item) for item in row.choices}
            assert named == {name for name in NAMES if name in shown} and answer in NAMES
            room = 256 - 2 * cloze.ANSWER_TOKENS - 2 * len(rows.tokens(row.cue))
            assert len(rows.tokens(row.document)) + len(rows.tokens(row.cue)) <= 256 - cloze.ANSWER_TOKENS
            words = re.findall(r"[ \n]*[^ \n]+", text[place:end])
            bins[BINS * len(encode("".join(words[1:]))) // room] += 1
            for guess in right:
                right[guess] += row.guesses[guess] in row.answers
                assert rows.text(row.guesses[guess]) in named
            assert rows.text(row.guesses[cloze.RECENT]) == max(named, key=shown.rfind)
            answers.add(answer)
        assert bins == [wanted // BINS] * BINS
        assert prepared.sets["gaps"].splits[split].guesses == {k: 100 * n / wanted for k, n in right.items()}
    assert len(answers) > 6


def test_a_name_within_another_word_is_not_that_name():
    passage = "Ann saw Tom. They went to Annette, who was not in."
    gap = ClozeQuestion(0, len(passage), 0, "", "", "", ("Ann", "Tom"), (), 9, {}, 0)
    planted, read = insert_needle(gap, passage, {"Ann", "Tom", "Maria"}, "1")
    assert planted.answer == "Maria" and read == f"{NEEDLE} Maria. {passage}"
    assert planted.guesses[cloze.RECENT] == "Tom"
    # a name that is too rare to be a choice is no answer, either
    other, _ = insert_needle(gap, f"{passage} Maria came.", {"Ann", "Tom", "Maria", "Olga"}, "1")
    assert other.answer == "Olga"
    with refused("too few names to plant another one"):
        insert_needle(gap, f"{passage} Maria came.", {"Ann", "Tom", "Maria"}, "1")


def test_passages_of_training_from_the_shortest_on(texts, vocab, tmp_path):
    """Of all lengths, the shortest less often, as few sentences fit; those of validation fill their contexts."""
    more = {
        "source": "planted",
        "question_format": "completion",
        "questions": 400,
        "tokens": 128 + 32 + 14,
        "min_tokens": 32,
    }
    prepared = make(texts, vocab, tmp_path / "gaps", **more)
    rows, valid = prepared.split("train"), prepared.split("valid")
    sizes = np.array([len(rows.tokens(row.document)) - 7 for row in rows])  # without what is planted
    assert 24 <= sizes.min() and 112 <= sizes.max() <= 128 and 0.2 < (sizes < 64).mean() < 0.6
    assert all(len(valid.tokens(row.document)) > 112 for row in valid)
    lengths = [
        len(story(7)[gap.passage_start : gap.passage_end].split())
        for gap in gaps_of(story(7), "last", "next", shortest=64)
    ]
    assert min(lengths) < 90 and max(lengths) > 180


def test_too_few_names_to_exchange():
    (gap, *_) = gaps_of(story(7), "last", "next")
    with refused("too few short names to exchange"):
        NamePermutation(NAMES[:2], encode, 1)(gap, "Bren", 300, "digest")
    with refused("too few names to plant another one"):
        insert_needle(gap, "Bren", gap.choices, "chance")


def test_contexts_longer_than_in_training(texts, vocab, tmp_path):
    prepared = make(texts, vocab, tmp_path / "gaps", valid_tokens=512, questions=16, source="earlier")
    longest = {split: info.longest for split, info in prepared.sets["gaps"].splits.items()}
    short, long = 256 - cloze.ANSWER_TOKENS, 512 - cloze.ANSWER_TOKENS
    assert longest["train"] <= short < longest["valid"] <= long >= longest["test"]
    assert max(row.distance for row in prepared.split("test")) > 256
    assert prepared.sets["gaps"].title == "which name fills the gap, in 256 and 512 tokens"


def test_the_seed_alone_decides_and_more_questions_have_the_fewer_among_them(texts, vocab, usual, tmp_path):
    fewer, other = (
        {row.id for row in make(texts, vocab, tmp_path / f"{seed}", seed=seed, questions=16).split("train")}
        for seed in (1, 2)
    )
    assert other != fewer < {row.id for row in usual.split("train")}


def test_documents_of_one_source_are_divided(vocab, tmp_path):
    source, said = write_stories(tmp_path / "all.jsonl", range(8), 120), []
    given = {"train": (source,), "valid": (), "test": (), "valid_questions": 8, "seed": 2, "tokens": 128}
    prepared = make(tmp_path, vocab, tmp_path / "gaps", said, **given)
    assert prepared.splits == ("train", "valid", "test") and said[0].startswith("few documents (8)")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tokens": 20000}, r"the train split has no passage of 20000 tokens, its longest document has \d+ tokens"),
        ({"questions": 10**5}, r"train split has \d+ questions with the answer .* % of the passage back, not 12500"),
        ({"valid_questions": 10**5}, "the valid split has .*: use --valid-questions"),
        ({"test": "valid"}, "the test split: valid.jsonl has a document that the valid split has, too: leave it out"),
        ({"valid_tokens": 20000}, "the valid split has no passage of 20000 tokens, .*: use fewer --valid-tokens"),
        ({"tokens": 100}, "--tokens 100 is out of range: use 128 to"),
        ({"questions": 7}, "--questions 7 is out of range"),
        ({"question_position": "middle"}, "--question-position middle is not one of last, first, both"),
        ({"entity_names": "mine"}, "--entity-names mine is not one of own, exchanged"),
        ({"source": "planted"}, "--source planted needs a completion .* so --question-format gap does not go"),
        (
            {"source": "planted", "question_format": "completion", "entity_names": "exchanged"},
            "--entity-names exchanged does not go with it",
        ),
        ({"min_tokens": 300}, "--min-tokens 300 is out of range: use 16 to 128"),
        ({"question_format": "riddle"}, "--question-format riddle is not one of gap, completion"),
        ({"question_format": "completion", "question_position": "both"}, "leave out --question-position both"),
        ({"valid": ()}, "--test is given without --valid"),
        ({"text_field": "texts"}, "line 1 has no field 'texts' but text"),
        ({"train": "plain"}, "the train split has no names, of words that are capitalised within"),
    ],
)
def test_refusals(texts, vocab, tmp_path, more, words):
    plain = tmp_path / "plain.txt"
    plain.write_text("they talked of the harvest and of bread until it was dark. " * 100)
    files = {"valid": (texts / "valid.jsonl",), "plain": (plain,)}
    more = {name: files.get(value, value) if name in SPLITS else value for name, value in more.items()}
    with refused(words):
        make(texts, vocab, tmp_path / "new" / "gaps", **more)
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []
