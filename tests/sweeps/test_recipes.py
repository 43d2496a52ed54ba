"""Recipes: files that are read, taken over by others or refused in one line, and what they say of text and batch."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import with_documents, with_vocabulary
from refusal import refused as raises
from sweep_commands import DRY, LAUNCHERS, dry_run, flag, parse, recipe_error, refused

from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Preset
from fairseq_rpe.sweeps.sweep_record import Method

GOOD: dict[str, Any] = {
    "title": "A title",
    "paper": "A paper",
    "kind": "algorithms",
    "methods": {"first": {"rpe": "rope"}, "second": {"rpe": "alibi", "positions_eval": "offset:tokens=2"}},
    "presets": {"laptop": {"algorithms": ["copy:test=50"], "updates": 9, "lr": 0.01, "methods": ["first"]}},
    "published": {"source": "Table 9", "first": {"copy": 12.5}},
}


def written(folder: Path, recipe: dict[str, Any]) -> Path:
    """The recipe as a TOML file."""

    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{ " + ", ".join(f'"{k}" = {value(w)}' for k, w in v.items()) + " }"
        if isinstance(v, list):
            return "[" + ", ".join(map(value, v)) + "]"
        return str(v).lower() if isinstance(v, bool) else f'"{v}"' if isinstance(v, str) else str(v)

    text = "".join(f'"{k}" = {value(v)}\n' for k, v in recipe.items())
    assert tomllib.loads(text) == recipe
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def changed(*path: str, to: Any = None) -> dict[str, Any]:
    """The good recipe with one value replaced, added, or (None) taken away."""
    recipe = copy.deepcopy(GOOD)
    inner = recipe
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1], None)
    if to is not None:
        inner[path[-1]] = to
    return recipe


def test_documents_that_are_not_marked_are_refused_before_training(corpus, tmp_path):
    data = with_documents(corpus, tmp_path)
    argv = [
        "--encodings",
        "alibi",
        "--out",
        tmp_path / "x",
        "--tokens",
        "32",
        *DRY,
        "--blocks",
        "document",
        "--lengths",
    ]
    assert len(dry_run(data, *argv, "64")) == 2
    assert "no document boundaries" in refused(corpus, *argv, "64")
    assert "longest document" in refused(data, *argv, "1500")
    plain = refused(data, *argv, "64", "--eval-data", f"plain={corpus}")
    assert f"{corpus}/test has no document boundaries" in plain


def test_the_command_line_wins_over_the_recipe(tmp_path):
    path = written(tmp_path, GOOD)
    given = ["--recipe", path, "--out", tmp_path / "x"]
    (train, measure) = dry_run(*given)
    assert (flag(train, "--updates"), flag(train, "--lr"), flag(train, "--seed")) == ("9", "0.01", "1")
    assert flag(train, "--algorithm") == "copy:test=50" and flag(train, "--rpe") == "rope"
    own = ["--methods", "all", "--algorithms", "reverse:test=400", "--updates", 7, "--lr", 0.5, "--lengths", "2,3"]
    lines = dry_run(*given, *own, "--seeds", 4)
    assert [line[0] for line in lines] == ["train", "eval-task"] * 2
    for line in lines[::2]:
        assert (flag(line, "--updates"), flag(line, "--lr"), flag(line, "--seed")) == ("7", "0.5", "4")
        assert flag(line, "--algorithm") == "reverse:test=400"
    assert [flag(line, "--rpe") for line in lines[::2]] == ["rope", "alibi"]
    assert all(flag(line, "--lengths") == "2,3" for line in lines[1::2])
    assert "--positions-eval" not in measure and flag(lines[3], "--positions-eval") == "offset:tokens=2"


def test_an_encoding_for_evaluation_alone_shares_the_training(corpus, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "extend"\n[presets.laptop]\nlengths = [64, 128]\nmethods = ["rope", "yarn-untuned"]\n')
    lines = dry_run(corpus, "--recipe", path, "--out", tmp_path / "x")
    assert [line[0] for line in lines] == ["train", "eval", "eval"] and "--rpe" not in lines[1]
    assert flag(lines[2], "--rpe") == "rope:scaling=yarn,factor=4,original_length=64"


def test_a_recipe_may_share_parameters_and_the_command_line_wins(corpus, tmp_path):
    for given, share in (([], "model"), (["--rpe-share", "layer"], "layer")):
        train = dry_run(corpus, "--recipe", "fire-lm-shared", "--out", tmp_path / "x", *given)[0]
        assert flag(train, "--rpe-share") == share


def test_another_vocabulary_is_refused(corpus, tmp_path):
    paper = ["--recipe", "extrapolation-wikitext103", "--preset", "paper"]
    for launcher in ([], DRY):
        said = refused(corpus, *paper, *launcher, "--out", tmp_path / "x")
        assert f"{corpus} has a vocabulary of " in said and "trains on 50,265 of gpt2: prepare another folder" in said
        assert "fairseq-rpe prepare-corpus wikitext103 --out data-bin/wikitext103-gpt2 --tokenizer gpt2" in said
    right = with_vocabulary(corpus, tmp_path, 50_265)
    lines = dry_run(right, *paper, "--tokens", "512", "--lengths", "600", "--out", tmp_path / "x")
    assert lines[0][:2] == ["train", str(right)]
    said = refused(right, *paper[:2], "--preset", "desktop")
    assert "has a vocabulary of 50,265 types, this recipe trains on 4,096 of bpe" in said
    assert "--out data-bin/wikitext103-4096 --tokenizer bpe --vocab-size 4096" in said


def test_a_recipe_of_your_own_names_its_vocabulary(corpus, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "fire-lm"\n[presets.laptop]\nvocabulary = 999\n')
    said = refused(corpus, "--recipe", path)
    assert "this recipe trains on 999: prepare another folder" in said and "prepare-corpus stdlib --out" in said
    scales = '[presets.laptop]\ntokens = 32\nlengths = [32]\nvocabulary = 999\ntokenizer = "bpe"\n'
    path.write_text(f'title = "t"\npaper = "p"\nkind = "text"\n[methods.a]\nrpe = "alibi"\n{scales}')
    said = refused(corpus, "--recipe", path)
    assert f"fairseq-rpe prepare SOURCE --out {corpus}-bpe --tokenizer bpe --vocab-size 999" in said


def test_a_laptop_scale_takes_any_vocabulary(corpus, tmp_path):
    names = set(recipes.names()) - {"divergent-series"}  # is about a vocabulary of short tokens
    scales = [recipe.presets["laptop"] for recipe in map(recipes.load, names) if "laptop" in recipe.presets]
    assert scales and all(scale.vocabulary is None for scale in scales)
    assert dry_run(corpus, "--recipe", "fire-lm", "--out", tmp_path / "x")[0][0] == "train"


def test_a_folder_that_is_not_there_is_told_with_its_preparation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = "make it with fairseq-rpe prepare-corpus books --out {} --tokenizer gpt2"
    paper = ["--recipe", "extrapolation-books", "--preset", "paper"]
    assert how.format("data-bin/books-gpt2") in refused(*paper)
    assert how.format("mine") in refused("mine", *paper)
    assert dry_run("mine", *paper)[0] == ["prepare-corpus", "books", "--out", "mine", "--tokenizer", "gpt2"]
    [first, *_] = dry_run("--recipe", "fire-lm")
    assert first == ["prepare-corpus", "stdlib", "--out", "data-bin/stdlib"]
    assert "does not exist" in refused("mine", "--encodings", "rope", "--lengths", "64", "--out", "x")


def test_a_batch_is_divided(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def batch(given: str, recipe: str = "extrapolation-books --preset paper", line: int = 1) -> tuple:
        one = parse(dry_run("--recipe", *recipe.split(), *given.split())[line])
        return one.batch_sentences, one.update_freq

    assert batch("") == (128, None) and batch("--nproc 8") == (16, None)
    assert batch("--nproc 8 --nodes 2 --update-freq 4") == (2, 4) and batch("--update-freq 16") == (8, 16)
    assert batch("--nproc 4", "extrapolation-books") == (2, None)
    # an option is taken as it is
    assert batch("--nproc 8 --batch-sentences 128") == (128, None)
    # one that the recipe does not say is divided too
    assert batch("--nproc 2", "warping-lm") == (8, None)
    assert batch("--nproc 2 --algorithms copy:items=3,test=60", "warping-algorithmic", 0) == (32, None)
    said = refused("--recipe", "extrapolation-books", "--preset", "paper", "--nproc", "3")
    assert "the recipe's 128 sequences per update cannot be divided among 3 processes" in said


def test_another_schedule_leaves_out_where_the_cosine_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--recipe", "fire-lm", "--preset", "paper", "--schedule", "linear"]
    assert parse(dry_run(*given)[1]).min_lr is None


# files


def test_a_good_recipe_is_read(tmp_path):
    recipe = recipes.load(str(written(tmp_path, GOOD)))
    assert (recipe.name, recipe.kind) == ("mine", "algorithms")
    assert [m.name for m in recipe.select_methods(("all",))] == ["first", "second"]
    assert [m.name for m in recipe.select_methods(("second", "first"))] == ["second", "first"]
    assert recipe.methods[1] == Method("second", "alibi", "identity", "offset:tokens=2")
    assert recipe.published.values["first"] == {"copy": 12.5}
    assert recipes.load(str(written(tmp_path, changed("published")))).published is None


def test_a_recipe_takes_over_what_it_does_not_say(tmp_path):
    written(tmp_path, GOOD).rename(tmp_path / "base.toml")
    presets = {"laptop": {"updates": 7}, "large": {"updates": 8, "algorithms": ["sort"]}}
    methods = {"second": {"positions_eval": "offset:tokens=3"}, "third": {"rpe": "nope"}}
    path = written(tmp_path, {"base": "base.toml", "title": "Mine", "presets": presets, "methods": methods})
    recipe = recipes.load(str(path))
    assert (recipe.name, recipe.title, recipe.paper, recipe.kind) == ("mine", "Mine", "A paper", "algorithms")
    assert recipe.preset("laptop") == Preset(algorithms=("copy:test=50",), updates=7, lr=0.01, methods=("first",))
    assert recipe.preset("large") == Preset(algorithms=("sort",), updates=8)
    assert [m.name for m in recipe.methods] == ["first", "second", "third"]
    assert recipe.methods[1] == Method("second", "alibi", "identity", "offset:tokens=3")
    assert recipe.published.to_dict() == GOOD["published"]
    own = {"base": "base.toml", "published": {"source": "Table 1", "second": {"copy": 1.0}}}
    assert recipes.load(str(written(tmp_path, own))).published.to_dict() == own["published"]


def test_a_base_that_cannot_be_used_is_refused(tmp_path):
    for base, words in (
        ("mine.toml", "is its own base"),
        ("none.toml", "none.toml does not exist"),
        ("warping-ml", "unknown recipe 'warping-ml' (did you mean 'warping-lm'?)"),
        (3, "base must be the name of a recipe, not 3"),
    ):
        with raises(re.escape(words)):
            recipes.load(str(written(tmp_path, {"base": base})))


def test_a_long_chain_of_bases_is_read(tmp_path):
    written(tmp_path, GOOD).rename(tmp_path / "r0.toml")
    for number in range(1, 1500):
        (tmp_path / f"r{number}.toml").write_text(f'base = "r{number - 1}.toml"\ntitle = "number {number}"\n')
    recipe = recipes.load(str(tmp_path / "r1499.toml"))
    assert recipe.title == "number 1499" and recipe.paper == GOOD["paper"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (changed("titel", to="x"), "unknown key 'titel' (did you mean 'title'?)"),
        (changed("methods", "first", "positions_trian", to="x"), "method 'first' has an unknown key 'positions_trian'"),
        (changed("presets", "laptop", "update", to=3), "unknown key 'update' (did you mean 'updates'?)"),
        (changed("methods", "first", "rpe"), "method 'first' lacks rpe"),
        *((changed(key), f"lacks {key}") for key in ("title", "paper", "kind", "methods", "presets")),
        (changed("title", to=3), "title of the recipe must be text, not 3"),
        (changed("methods", to=["rope"]), "methods of the recipe must be a table"),
        (changed("methods", "first", to="rope"), "method 'first' is not a table"),
        (changed("methods", "first", "rpe", to=5), "rpe of method 'first' must be text, not 5"),
        (
            changed("presets", "laptop", "updates", to="many"),
            "updates of preset 'laptop' must be a whole number above 0",
        ),
        (changed("presets", "laptop", "updates", to=True), "updates of preset 'laptop' must be a whole number above 0"),
        (changed("presets", "laptop", "algorithms", to="copy"), "algorithms of preset 'laptop' must be a list"),
        (changed("presets", "laptop", to=3), "preset 'laptop' is not a table"),
        (changed("kind", to="algorithm"), "kind of the recipe must be algorithms or answers or text, not 'algorithm'"),
        (changed("methods", to={}), "at least one method and one preset"),
        (changed("presets", to={}), "at least one method and one preset"),
        (
            changed("methods", "two words", to={"rpe": "rope"}),
            "method 'two words' has no name or a blank or comma in it",
        ),
        (changed("methods", "", to={"rpe": "rope"}), "method '' has no name"),
        (changed("published", to="Table 9"), "published of the recipe must be a table"),
        (changed("presets", "laptop", "corpus", to="arxvi"), "unknown corpus 'arxvi' (did you mean 'arxiv'?)"),
        (changed("scales", to={}), "the recipe has the old key 'scales': write 'presets'"),
        (
            changed("presets", "laptop", "asking", to={}),
            "preset 'laptop' has the old key 'asking': write 'question_config'",
        ),
        (changed("presets", "laptop", "question_config", to={"by": "x"}), "old key 'by': write 'answer_mode'"),
        (changed("presets", "laptop", "question_config", to={"cut": "x"}), "old key 'cut': write 'truncate'"),
    ],
)
def test_malformed_recipes_are_refused(recipe, words, tmp_path):
    assert words in recipe_error(written(tmp_path, recipe))


@pytest.mark.parametrize(
    ("published", "culprit"),
    [
        ({"first": {"copy": 12.5}}, "source"),
        ({"source": "Table 9", "first": 12.5}, "first"),
        ({"source": "Table 9", "first": {"copy": "much"}}, "first"),
        ({"source": "Table 9", "frist": {"copy": 12.5}}, "frist"),
        ({"source": "Table 9", "url": "javascript:x"}, "javascript:x"),
        ({"source": "Table 9", "url": 3}, "url"),
        ({"source": "Table 9", "settings": {"token": 512}}, "did you mean 'tokens'"),
        ({"source": "Table 9", "settings": {"updates": 0}}, "updates"),
        ({"source": "Table 9", "settings": 3}, "settings"),
        ({"source": "Table 9", "measure": "bits"}, "ppl or log_ppl or score, not 'bits'"),
    ],
)
def test_malformed_published_values_are_refused(published, culprit, tmp_path):
    """Now, and not by a traceback of the report when everything has been trained."""
    assert culprit in recipe_error(written(tmp_path, changed("published", to=published)))


OUT_OF_RANGE = {
    "methods": [[1], [], ["a", "a"]],
    "algorithms": [[3], []],
    "extra": [[1]],
    "lengths": [["a"], [0]],
    "seeds": [[0], [1, 1]],
}
OUT_OF_RANGE |= {"schedule": ["steps"], "betas": [[0.9], [0.9, 1.0]], "weight_decay": [-0.1], "vocabulary": [0]}
OUT_OF_RANGE |= {"activation_fn": ["tanh"], "share_embeddings": ["yes"], "compute_dtype": ["fp16"]}
OUT_OF_RANGE |= {"rpe_share": ["head"], "updates": [0], "batch_sentences": [-1], "update_freq": [0]}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_values_that_no_flag_would_take_are_refused(key, tmp_path):
    """A recipe's values are flags of ``sweep``: what its parser refuses is refused here, with the file's name."""
    for value in OUT_OF_RANGE[key]:
        path = written(tmp_path, changed("presets", "laptop", key, to=value))
        said = refused("--recipe", path, "--out", tmp_path / "x", *DRY)
        assert str(path) in said and key in said


def test_what_is_no_toml_file_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    for text in (b"title = ", b"[methods\n", b"a = 1\na = 2\n", b"\xff\xfe\x00", b"a = " + b"[" * 200_000):
        path.write_bytes(text)
        assert f"recipe {path} is not TOML" in recipe_error(path)
    (tmp_path / "a.toml").mkdir()
    (tmp_path / "b.toml").symlink_to("b.toml")
    for name, words in (("a", "is not a file"), ("b", "is not a file"), ("c", "does not exist")):
        assert f"{name}.toml {words}" in recipe_error(tmp_path / f"{name}.toml")


def test_names_and_flags_that_do_not_go_with_a_recipe(tmp_path):
    path, other = written(tmp_path, GOOD), tmp_path / "other"
    other.mkdir()
    scale = written(other, changed("presets", "laptop", "methods", to=["frist"]))
    own, plain = ["--recipe", path], ["--encodings", "rope", "--algorithms", "copy"]
    text = ["--recipe", "warping-lm"]
    for argv, words in (
        (["--recipe", "warping-ml"], "unknown recipe 'warping-ml' (did you mean 'warping-lm'?); known: "),
        ([*own, "--preset", "labtop"], "recipe 'mine' has no preset 'labtop' (did you mean 'laptop'?)"),
        ([*own, "--methods", "first secnd"], "recipe 'mine' has no method 'secnd' (did you mean 'second'?)"),
        ([*own, "--methods", "first secnd"], "or all"),
        ([*own, "--methods", "first first"], "names one twice"),
        (["--recipe", scale], "has no method 'frist' (did you mean 'first'?)"),
        ([*own, "--positions-train", "warp"], "do not go with --recipe"),
        ([*own, "--positions-eval", "warp"], "do not go with --recipe"),
        ([*plain, "--methods", "first"], "--methods belongs to --recipe"),
        ([*plain, "--preset", "laptop"], "--preset laptop belongs to a recipe"),
        ([*own, "--encodings", "rope"], "either --encodings"),
        (["--algorithms", "copy"], "either --encodings"),
        ([tmp_path, *own], "recipe 'mine' generates its data: drop"),
        ([*text, "--algorithms", "copy"], "recipe 'warping-lm' compares on text: drop --algorithms"),
        ([*own, "--algorithms", " "], "--algorithms is empty"),
    ):
        assert words in refused("--out", tmp_path / "x", *argv) and not (tmp_path / "x").exists()


def test_two_methods_that_are_the_same_are_refused(tmp_path):
    same = changed("methods", "second", to={"rpe": "rope:base=10000", "positions_train": "identity"})
    said = refused("--recipe", written(tmp_path, same), "--methods", "all", "--out", tmp_path / "x")
    assert "'first' and 'second' are the same encoding" in said
    assert not any((tmp_path / "x" / name).exists() for name in ("runs", "sweep.json"))


def test_misspelt_specs_of_a_recipe_are_refused_before_training(tmp_path):
    for key, value, words in (
        ("rpe", "roppe", "did you mean 'rope'"),
        ("rpe_eval", "roppe", "did you mean 'rope'"),
        ("positions_train", "wrap", "did you mean 'warp'"),
        ("positions_eval", "interpolate:ratio=3", "must be more than 0 and at most 1"),
    ):
        path = written(tmp_path, changed("methods", "first", key, to=value))
        for launcher in LAUNCHERS:
            said = refused("--recipe", path, "--out", tmp_path / "x", *launcher)
            assert words in said and "method 'first'" in said and not (tmp_path / "x" / "runs").exists()


@pytest.mark.parametrize("name", ["passkey", "ruler"])
def test_newer_methods_of_retrieval_are_selected_by_name_alone(name):
    """A default sweep does not become longer; a name has the same encoding as in the recipe of the survey."""
    recipe, survey = recipes.load(name), recipes.load("survey-encodings")
    newer = {"forgetting-5", "stick_breaking", "rope-selective", "dape-v2", "grape_a", "path", "path-forget", "wall"}
    for preset in recipe.presets.values():
        assert preset.methods and not set(preset.methods) & (newer | {"pope"})
    specs = {method.name: method.rpe for method in survey.methods}
    chosen = recipe.select_methods((*sorted(newer), "pope"))
    assert all(method.rpe == specs.get(method.name, "pope") for method in chosen)
