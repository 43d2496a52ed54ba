"""Pass keys hidden in texts: exact numbers of tokens, order of depths, and cells equal to transformers' own answers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import CORPUS, run_here
from refusal import refusal
from small_models import random_model

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig

from fairseq_rpe.data.transformers_tokenizer import load_model_vocabulary
from fairseq_rpe.evaluation.passkey_prompts import PasskeyPrompts
from fairseq_rpe.utils.json_files import read_json_lines

LENGTHS, DEPTHS = (340, 371), (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama with a byte-level tokenizer, and its folder."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": 400, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    tokenizer.train([str(CORPUS)], trainers.BpeTrainer(special_tokens=["<|begin|>", "<|end|>"], **options))
    sizes = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 350, "bos_token_id": 0, "eos_token_id": 1}
    model = random_model(AutoConfig.for_model("llama", num_key_value_heads=2, pad_token_id=None, **sizes)).eval()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, folder


def passkey(folder, out, *options):
    return run_here(
        "passkey", folder, "--lengths", ",".join(map(str, LENGTHS)), "--depths", "3", "--examples", "3",
        "--device", "cpu", "--out", out, *options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompts(llama):
    return PasskeyPrompts(load_model_vocabulary(llama[1]).encode)


def test_every_length_and_depth_has_the_exact_number_of_tokens(prompts):
    for length in (*range(prompts.min_length, prompts.min_length + 40, 3), 1000):
        for depth in DEPTHS:
            example = prompts.example(length, depth, 0, 4, 1)
            assert {len(example.prompt) + len(answer) for answer in example.answers} == {length}
            assert len(set(example.keys)) == 4


def test_the_key_moves_from_start_to_end_with_the_depth(llama, prompts):
    vocabulary = load_model_vocabulary(llama[1])
    texts = [vocabulary.decode(prompts.example(1000, depth, 0, 1, 1).prompt).decode() for depth in DEPTHS]
    places = [text.index("The pass key is") for text in texts]
    assert places == sorted(set(places))
    assert "there.\n\nThe pass key is" in texts[0] and "is the pass key.\n\nWhat is the pass key?" in texts[-1]
    assert all(text.endswith("What is the pass key? The pass key is") for text in texts)
    assert {text.count("The grass is green.") for text in texts} == {texts[0].count("The grass is green.")}


def test_likelihood_is_that_of_transformers(llama, prompts, tmp_path):
    model, folder = llama
    passkey(folder, tmp_path / "o", "--answer", "likelihood", "--choices", "3", "--examples", "2")
    ids = torch.tensor(load_model_vocabulary(folder).token_ids)
    for row in read_json_lines(tmp_path / "o" / "passkey.jsonl"):
        right = 0
        for number in range(2):
            example = prompts.example(row["length"], row["depth"], number, 3, 1)
            scores = []
            for answer in example.answers:
                tokens = ids[torch.tensor([[*example.prompt, *answer]])]
                with torch.no_grad():
                    logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
                scores.append(float(logprobs.gather(1, tokens[0, 1:, None])[-len(answer) :].sum()))
            right += scores[0] > max(scores[1:])
        assert row["right"] == right, (row["length"], row["depth"])


def test_generation_counts_texts_that_are_the_key(llama, prompts, monkeypatch, tmp_path):
    """A search that returns the right answer of every second example has these hits."""
    from fairseq_rpe.evaluation import passkey as module

    answers = {
        prompts.example(n, depth, i, 1, 1).prompt: prompts.example(n, depth, i if i != 1 else 0, 1, 1).answers[0]
        for n in LENGTHS
        for depth in (0.0, 0.5, 1.0)
        for i in range(3)
    }
    monkeypatch.setattr(
        module, "greedy_steps", lambda _, rows, steps: torch.tensor([answers[tuple(row)] for row in rows.tolist()])
    )
    passkey(llama[1], tmp_path / "o")
    rows = read_json_lines(tmp_path / "o" / "passkey.jsonl")
    assert [row["hits"] for row in rows] == ["a0"] * 6 and {row["right"] for row in rows} == {2}
    assert len((tmp_path / "o" / "passkey.csv").read_text().splitlines()) == 7
    assert (tmp_path / "o" / "passkey.png").stat().st_size > 1000


def test_resumes_after_a_cell(llama, tmp_path):
    out = tmp_path / "o"
    passkey(llama[1], out, "--rpe", "self_extend")
    results = out / "passkey.jsonl"
    lines = results.read_text().splitlines()
    assert len(lines) == 6 and json.loads(lines[0])["rpe"].startswith("self_extend")
    results.write_text("\n".join(lines[:4]) + "\n")
    passkey(llama[1], out, "--rpe", "self_extend")
    again = results.read_text().splitlines()
    assert again[:4] == lines[:4]  # with their seconds
    without_seconds = [[{**json.loads(line), "seconds": 0} for line in side] for side in (again, lines)]
    assert without_seconds[0] == without_seconds[1]


def test_filler_of_a_file(llama, tmp_path):
    text = tmp_path / "novel.txt"
    text.write_text("One two three. Is it four?  Five!\nSix seven", encoding="utf-8")
    passkey(llama[1], tmp_path / "o", "--filler", text)
    assert len(read_json_lines(tmp_path / "o" / "passkey.jsonl")) == 6


def test_refusals_leave_nothing(llama, tmp_path):
    folder, out = llama[1], tmp_path / "o"
    untokenized = tmp_path / "model"
    shutil.copytree(folder, untokenized)
    (untokenized / "tokenizer.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n")
    for model, options, words in (
        (folder, ("--lengths", "20"), "length 20 is too short"),
        (untokenized, ("--lengths", "340"), "has no tokenizer.json"),
        (tmp_path / "empty", ("--lengths", "340"), "has no config.json"),
        (folder, ("--lengths", "340", "--filler", tmp_path / "blank.txt"), "has no text"),
        (folder, ("--lengths", "340", "--choices", "3"), "--choices has no effect"),
    ):
        assert words in refusal("passkey", model, "--out", out, *options)
        assert not out.exists()
