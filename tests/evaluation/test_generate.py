"""``generate``: prompts of text, generated tasks and questions, streamed text, JSON lines, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path

import pytest
import torch
from conftest import CORPUS, TRAIN_FLAGS, checkpoint_with, fairseq, run_here
from prepared_folder import make_folder
from refusal import refusal

from fairseq_rpe.cli.generate import _TextPrinter
from fairseq_rpe.cli.main import main
from fairseq_rpe.data.text_codec import IncrementalText, SymbolCodec, _DifferenceDecoder, load_codec
from fairseq_rpe.data.tokenization import EOS, _gpt2_bytes
from fairseq_rpe.decoder.beam_search import beam_search
from fairseq_rpe.decoder.generation import greedy_search, greedy_steps
from fairseq_rpe.evaluation import text_generation
from fairseq_rpe.evaluation.generation_records import GenerationOptions, Prompt
from fairseq_rpe.evaluation.loading import load_model
from fairseq_rpe.evaluation.records import EvalOverrides

MODELS: dict = {}
PROMPT = "I have just returned – naïvely – from"
TASK = "copy:items=3,times=3,train=40,valid=8,test=8,alphabet=12"


@pytest.fixture(scope="module")
def folder(made_once) -> Path:
    """A corpus and questions of one vocabulary of byte pieces, and checkpoints of text, a task and questions."""

    def fill(folder: Path) -> None:
        text = CORPUS.read_text(encoding="utf-8")[:40_000] + "naïve – “café” 你好 😀\n" * 30
        (folder / "text.txt").write_text(text, encoding="utf-8")
        source = ["prepare", folder / "text.txt", "--out", folder / "bin", "--split-by", "text", "--workers", "1"]
        run_here(*source, "--vocab-size", "400")
        make_folder(folder / "questions", vocab=folder / "bin")
        for name, data, flags in (
            ("text", [folder / "bin"], TRAIN_FLAGS),
            ("task", [], [*answer_flags("rpe_algorithmic", ""), "--algorithm", TASK]),
            ("questions", [folder / "questions"], answer_flags("rpe_answers", "128")),
        ):
            flags = [*flags, "--rpe", "alibi", "--max-update", "1", "--disable-validation"]
            fairseq("train", *data, *flags, "--save-dir", folder / name)

    return made_once("generate", fill)


def answer_flags(task: str, tokens: str) -> list[str]:
    """The flags of a training on text, changed to those of a task whose answers are learned."""
    new = {"language_modeling": task, "lm_cross_entropy": "answer_cross_entropy"}
    start = TRAIN_FLAGS.index("--tokens-per-sample")
    others = [*TRAIN_FLAGS[:start], *TRAIN_FLAGS[start + 2 :]]
    return [*(new.get(word, word) for word in others), *(["--tokens-per-sample", tokens] if tokens else [])]


@pytest.fixture(scope="module")
def state(folder) -> dict:
    """The checkpoint of text with larger weights of words, so that predictions differ clearly."""
    state = torch.load(folder / "text" / "checkpoint_last.pt")
    for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        state["model"][name] = 8 * state["model"][name]
    return state


@pytest.fixture(autouse=True)
def models_loaded_once(monkeypatch):
    """Commands of all tests share their models: loading takes longer than generating a few tokens."""

    def load_once(checkpoint, overrides, data, log):
        key = (checkpoint, overrides.rpe, overrides.positions_eval, overrides.compute_dtype, data)
        if key not in MODELS:
            MODELS[key] = load_model(checkpoint, overrides, data, log)
        return MODELS[key]

    monkeypatch.setattr(text_generation, "load_model", load_once)


@pytest.fixture(scope="module")
def checkpoint(state, tmp_path_factory) -> Path:
    return checkpoint_with(state, tmp_path_factory.mktemp("text"))


def counted(function, counts: list[int]):
    """The function, which appends the number of its rows to a list."""

    def wrapper(model, rows, *more):
        counts.append(len(rows))
        return function(model, rows, *more)

    return wrapper


def lines(done) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def greedy_text(checkpoint: Path, folder: Path, tokens: int) -> tuple[list[int], bytes]:
    """Tokens and bytes that follow the prompt, by full decoding in one row."""
    model, _ = load_model(checkpoint, EvalOverrides(device="cpu"), folder / "bin")
    codec = load_codec("bpe", folder / "bin")
    ids = greedy_steps(model, torch.tensor([[EOS, *codec.encode(PROMPT)]]), tokens)[0].tolist()
    return ids, b"".join(codec.decoder([]).add(token) for token in ids)


def test_streamed_text_is_that_of_greedy_decoding(checkpoint, folder, monkeypatch):
    """It is written piece by piece, in whole characters; a stop string within it ends it."""
    _, data = greedy_text(checkpoint, folder, 40)
    text = data.decode(errors="replace")
    done = run_here("generate", checkpoint, PROMPT, "--temperature", "0", "--max-tokens", "40")
    assert done.stdout == PROMPT + text + "\n" * (not text.endswith("\n"))
    assert "tokens/s" in done.stderr and "the model was trained on 32" in done.stderr
    start = len(text) // 2
    stop = text[start : start + 7]  # several tokens
    words = ["--temperature", "0", "--max-tokens", "40", "--stop", stop, "--stop", "never", "--no-echo"]
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    cut = run_here("generate", checkpoint, *words)
    assert cut.stdout.removesuffix("\n") == text[: text.index(stop)].removesuffix("\n")


def test_several_texts_are_printed_in_order(checkpoint):
    words = ["--max-tokens", "12", "--samples", "2", "--seed", "5"]
    outputs = {run_here("generate", checkpoint, *words, "a b", "c", "--batch", n).stdout for n in "14"}
    assert len(outputs) == 1
    (output,) = outputs
    assert [f"=== {n} of 4 ===" in output.splitlines() for n in (1, 2, 3, 4)] == [True] * 4


def test_a_closed_pipe_ends_the_generation(checkpoint, monkeypatch):
    """As in ``generate … --json | head -1``: no text is generated after the reader has gone."""
    lines = []

    class ClosedPipe(io.StringIO):
        def write(self, text):
            if lines:
                raise BrokenPipeError
            lines.append(text)
            return len(text)

    stats = []
    monkeypatch.setattr(text_generation, "sample_rows", counted(text_generation.sample_rows, stats))
    with contextlib.redirect_stdout(ClosedPipe()):
        command = ["generate", str(checkpoint), "a", "--samples", "9", "--max-tokens", "2", "--json", "--batch", "1"]
        assert main(command) == 0
    assert len(stats) < 9 and json.loads("".join(lines))["index"] == 0


def test_ctrl_c_promises_no_more_than_it_can(checkpoint, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(text_generation, "sample_rows", stop)
    streamed = run_here("generate", checkpoint, "a", ok=False)
    assert streamed.returncode == 130 and "use --out to resume" in streamed.stderr
    stored = run_here("generate", checkpoint, "a", "--out", tmp_path / "x.jsonl", ok=False)
    assert stored.returncode == 130 and "rerun the same command to resume" in stored.stderr


def test_a_terminal_shows_control_characters_and_does_not_obey_them(monkeypatch):
    prompt = Prompt(text="a", source="", options=GenerationOptions())
    for is_terminal, shown in ((True, "a\\x1b[2Jé\tb\\x9b\n"), (False, "a\x1b[2Jé\tb\x9b\n")):
        out = io.StringIO()
        out.isatty = lambda value=is_terminal: value
        monkeypatch.setattr("sys.stdout", out)
        _TextPrinter([prompt], True, "").add_text(0, "\x1b[2Jé\tb\x9b\n")
        assert out.getvalue() == shown


def test_json_lines(checkpoint, folder, tmp_path):
    """Options of a line replace those of the command, and the batch changes nothing."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": PROMPT, "id": "x", "temperature": 1}, {"prompt": "", "max_tokens": 3, "samples": 1}]
    rows += [{"prompt": PROMPT, "temperature": 0, "stop": ["e"]}, {"prompt": "The moor " * 9, "top_k": 3, "seed": 7}]
    # options without effect on a greedy line would be refused
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    words = ["generate", checkpoint, "--jsonl", prompts, "--max-tokens", "9", "--logprobs", "--no-echo"]
    alone, together = (lines(run_here(*words, "--batch", n)) for n in ("1", "7"))
    for one, other in zip(alone, together, strict=True):
        assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-4)
        assert one == other and len(one["tokens"]) <= 9 and "prompt" not in one
    assert [(row["index"], row.get("id"), row["stop"]) for row in alone[:2]] == [
        (0, "x", "length"),
        (1, None, "length"),
    ]
    assert alone[1]["prompt_tokens"] == 1 and len(alone[1]["tokens"]) == 3
    ids, data = greedy_text(checkpoint, folder, 9)
    assert alone[2]["tokens"] == ids[: len(alone[2]["tokens"])]
    assert alone[2]["text"] == data.decode(errors="replace").partition("e")[0]
    assert [row.get("seed") for row in alone] == [1, 1, None, 7]


def test_a_killed_job_continues(checkpoint, tmp_path, monkeypatch):
    out, words = tmp_path / "out" / "texts.jsonl", ["--samples", "3", "--max-tokens", "5", "--batch", "2"]
    command = ["generate", checkpoint, "one", "two", *words, "--out", out]
    done = run_here(*command)
    assert done.stdout == ""
    complete = out.read_bytes()
    rows = complete.splitlines(keepends=True)
    out.write_bytes(b"".join(rows[:3]) + rows[3][:40])  # as a kill leaves it
    counts: list[int] = []
    monkeypatch.setattr(text_generation, "sample_rows", counted(text_generation.sample_rows, counts))
    run_here(*command)
    assert counts == [2, 1] and out.read_bytes() == complete
    monkeypatch.setattr(text_generation, "load_model", None)  # nothing is left to do
    again = run_here(*command, "--json")
    assert again.stdout.encode() == complete
    words = ["--samples", "1", "--max-tokens", "5", "--out", out, "--json"]
    assert lines(run_here("generate", checkpoint, "one", *words)) == [json.loads(rows[0])]


def test_a_stored_text_has_the_present_name_of_its_prompt(checkpoint, tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    command = ["generate", checkpoint, "--jsonl", prompts, "--max-tokens", "3", "--out", out]
    prompts.write_text(json.dumps({"prompt": "one", "id": "a"}))
    (before,) = lines(run_here(*command, "--json", "--logprobs"))
    monkeypatch.setattr(text_generation, "load_model", None)  # nothing is generated
    prompts.write_text(json.dumps({"prompt": "one", "id": "b"}))
    (after,) = lines(run_here(*command, "--json", "--no-echo"))
    hidden = {"prompt", "logprobs"}
    assert after == {key: value for key, value in before.items() if key not in hidden} | {"id": "b"}
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "b"]


def test_beam_search(checkpoint, folder):
    model, _ = load_model(checkpoint, EvalOverrides(device="cpu"), folder / "bin")
    codec = load_codec("bpe", folder / "bin")
    best = beam_search(model, [[EOS, *codec.encode(PROMPT)]], 6, 3)[0][0]
    words = ["--beam", "3", "--max-tokens", "6", "--json", "--logprobs"]
    (row,) = lines(run_here("generate", checkpoint, PROMPT, *words))
    tokens = [token for token in row["tokens"] if token != EOS]
    assert tokens == best.tokens and row["stop"] == ("end" if EOS in row["tokens"] else "length")
    if row["stop"] == "end":
        assert sum(row["logprobs"]) / len(row["tokens"]) == pytest.approx(best.score, abs=1e-4)


def test_a_generated_task(folder):
    """Symbols between blanks; the answer ends by itself or after the last token, and is greedy by default."""
    checkpoint = folder / "task" / "checkpoint_last.pt"
    symbols = text_generation.algorithms.build(TASK).vocabulary()
    prompt = " ".join(symbols[:3])
    (row,) = lines(run_here("generate", checkpoint, prompt, "--max-tokens", "4", "--json"))
    assert row["options"]["temperature"] == 0 and row["prompt_tokens"] == 3
    assert row["text"].split() == [symbols[token - 4] for token in row["tokens"] if token != EOS]
    assert run_here("generate", checkpoint, prompt, "--max-tokens", "4").stdout == f"{prompt} {row['text']}\n"
    assert "is not a symbol of this model's task" in refusal("generate", checkpoint, f"{symbols[0]} nosuch")
    assert "is empty" in refusal("generate", checkpoint, " ")
    assert "--data has no effect" in refusal("generate", checkpoint, prompt, "--data", folder / "bin")


def test_questions(folder):
    """The answer ends by </s>, and the prompt begins without one, as in the training."""
    checkpoint = folder / "questions" / "checkpoint_last.pt"
    (row,) = lines(run_here("generate", checkpoint, "Which mill?", "--json", "--max-tokens", "8"))
    codec = load_codec("bpe", folder / "bin")
    ids = codec.encode("Which mill?")
    model, _ = load_model(checkpoint, EvalOverrides(device="cpu"), folder / "questions")
    (expected,) = greedy_search(model, [ids], 9)
    assert row["prompt_tokens"] == len(ids)
    assert [token for token in row["tokens"] if token != EOS] == expected[:8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--temperature", "-1"], "argument --temperature: '-1' is not a number from 0 on"),
        (["a", "--top-p", "0"], "argument --top-p: '0' is not a number above 0 and at most 1"),
        (["a", "--top-p", "1.5"], "argument --top-p"),
        (["a", "--stop", ""], "argument --stop: is empty"),
        (["a", "--beam", "2", "--temperature", "1"], "--temperature has no effect with --beam"),
        (["a", "--beam", "2", "--samples", "2"], "--samples has no effect with --beam"),
        (["a", "--temperature", "0", "--top-k", "3"], "--top-k has no effect without sampling"),
        (["a", "--logprobs"], "--logprobs adds numbers to JSON lines"),
        (["a", "--prompt-file", "{file}"], "PROMPT and --prompt-file both give prompts"),
        (["--prompt-file", "{missing}"], "does not exist"),
        (["--prompt-file", "{binary}"], "line 2 is not UTF-8"),
        (["--jsonl", "{broken}"], "broken.jsonl line 2 is not a JSON object"),
        (["--jsonl", "{typo}"], "typo.jsonl line 1: the line has an unknown key 'temprature' (did you mean"),
        (["--jsonl", "{typo}", "--data", "{here}"], "unknown key"),
        (["--jsonl", "{range}"], "range.jsonl line 1: top_p of the line must be a number above 0 and at most 1"),
        (["--jsonl", "{clash}"], "clash.jsonl line 1: top_k has no effect without sampling"),
        (["a", "--data", "{here}"], "has no dict.txt"),
        (["a", "--rpe", "rope:scaling=dynamic_ntk"], "follows the length of the text"),
        (["a", "--surprise"], "unrecognized arguments: --surprise"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(checkpoint, tmp_path, words, message):
    files = {
        "file": ("file.txt", b"a"),
        "binary": ("binary.txt", b"a\n\xff"),
        "broken": ("broken.jsonl", b'{"prompt": "a"}\n{"prompt"\n'),
        "typo": ("typo.jsonl", b'{"prompt": "a", "temprature": 1}\n'),
        "range": ("range.jsonl", b'{"prompt": "a", "top_p": 2}\n'),
        "clash": ("clash.jsonl", b'{"prompt": "a", "temperature": 0, "top_k": 2}\n'),
    }
    for name, content in files.values():
        (tmp_path / name).write_bytes(content)
    paths = {key: str(tmp_path / name) for key, (name, _) in files.items()}
    paths |= {"missing": str(tmp_path / "missing"), "here": str(tmp_path)}
    assert message in refusal("generate", checkpoint, *(word.format(**paths) for word in words))


def test_positions_and_tokenizers_limit_what_can_be_generated(state, folder, corpus, trained, tmp_path):
    learned = checkpoint_with(state, tmp_path, "learned")
    message = refusal("generate", learned, PROMPT, "--max-tokens", "30")
    assert "'learned' has 32 positions: give --max-tokens" in message
    most = int(message.split("--max-tokens ")[1].split()[0])
    assert len(lines(run_here("generate", learned, PROMPT, "--max-tokens", most, "--json"))[0]["tokens"]) == most
    assert "has no tokenizer" in refusal("generate", trained, "a")  # of fairseq-preprocess
    assert "trained with another vocabulary" in refusal("generate", trained, "a", "--data", folder / "bin")


def test_text_appears_when_it_is_certain():
    """For every division of the bytes into tokens; no text that a stop string may begin, and no half character."""
    text, numbers = "naïve 你好 😀 ab abc end", random.Random(0)
    for stops, result in (
        (["abc"], "naïve 你好 😀 ab "),
        (["好 😀", "x"], "naïve 你"),
        ([], text),
        (["endless"], text),
    ):
        for _ in range(20):
            data, pieces, shown = text.encode(), [], IncrementalText(stops)
            while data and not shown.is_stopped:
                size = numbers.randrange(1, 5)
                pieces.append(shown.append(data[:size]))
                data = data[size:]
                assert result.startswith("".join(pieces)) and "\ufffd" not in "".join(pieces)
            assert "".join(pieces) + shown.finish() == shown.text == result
            assert shown.is_stopped == (result != text)
    cut = IncrementalText()
    assert (cut.append("é".encode()[:1]), cut.finish()) == ("", "\ufffd")


def test_codecs():
    words = SymbolCodec(["<s>", "<pad>", "</s>", "<unk>", "the", "moor"], is_closed=False)
    assert words.encode("the  moor\n\nthe heath") == [4, 5, 2, 2, 4, 3]
    decoder = words.decoder([])
    assert b"".join(map(decoder.add, [4, 5, 2, 2, 4, 3])) == b"the moor\n\nthe <unk>"
    # a tokenizer that writes half a character as U+FFFD, as those of transformers do
    decoder = _DifferenceDecoder(lambda ids: bytes(ids).decode(errors="replace").encode(), list(b"ab"))
    pieces = [decoder.add(byte) for byte in "c你é".encode()] + [decoder.add(0xC3), decoder.finish()]
    assert b"".join(pieces).decode() == "c你é\ufffd"
    pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    sample = "é€😀\t\x7f\xad ~" + "".join(map(chr, range(256)))
    ((written, _),) = level.pre_tokenize_str(sample)
    assert _gpt2_bytes(written) == sample.encode()
