"""Parameters, FLOPs and memory that ``plan`` computes, against built models and measurements."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from pathlib import Path

import pytest
import specs
import torch
from conftest import VOCABULARY, run_here
from refusal import refusal
from torch.utils.flop_counter import FlopCounterMode

from fairseq_rpe.core.attention_options import AttentionOptions
from fairseq_rpe.decoder.config import BLOCK_PRESETS, DecoderConfig
from fairseq_rpe.decoder.costs import attention_options_by_layer, count_parameters, row_flops, visible_pairs
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms
from fairseq_rpe.runs import launch
from fairseq_rpe.runs.memory import Workload, estimate_memory, largest_batch
from fairseq_rpe.runs.model_config import trained_decoder
from fairseq_rpe.runs.settings import make_plan
from fairseq_rpe.runs.training_config import TrainingConfig

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", *".+=1", *(f"w{number}" for number in range(53))]
SIZES = {"vocabulary": 61, "padding_idx": 1, "layers": 3, "width": 32, "heads": 4, "ffn_width": 48}
WIDTHS = {"input_width": 16, "output_width": 24}
NORMFORMER = {"scale_attention": True, "scale_heads": True, "scale_ffn": True, "scale_residual": True}


def make_decoder(spec: str, **options) -> Decoder:
    config = DecoderConfig(**{**SIZES, **options})
    encodings = build_for_model(spec, config.heads, config.width, config.layers, 64, SYMBOLS, "auto", config.head_width)
    return Decoder(config, encodings, PositionTransforms("identity", "", 64, 1, 0))


def number_of_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("block", BLOCK_PRESETS)
def test_parameters_are_those_of_a_built_model(block):
    every_spec = specs.representatives(tokens=True) if block in ("classic", "llama") else ["rope"]
    models = [(spec, {}) for spec in every_spec]
    options = [{"kv_heads": 2, "head_width": 12}, {"qk_norm": "whole"}, {"share_embeddings": True}, WIDTHS]
    options += [{"embedding_norm": True, "final_norm": False, "bias": "qkv"}]
    options += [] if block == "gpt-neox" else [NORMFORMER]
    for spec, changes in [*models, *(("rope", changes) for changes in options)]:
        model = make_decoder(spec, **{**BLOCK_PRESETS[block], **changes})
        counts = count_parameters(model.config, model.encodings)
        assert counts.total == number_of_parameters(model), (spec, changes)
        assert counts.encoding == number_of_parameters(model.encodings)


CONFIGS = [
    {"block": block, "share_embeddings": True, "compute_dtype": "bf16", "dropout": 0.25} for block in BLOCK_PRESETS
]
CONFIGS += [
    {"arch": "small", "kv_heads": 2, "qk_norm": "head", "logit_softcap": 20.0, "norm_position": "output"},
    {"activation_fn": "geglu", "extra": ("--ffn-multiple", "32", "--checkpoint-activations")},
    {"extra": ("--decoder-layers", "3", "--decoder-embed-dim=64", "--decoder-ffn-embed-dim", "40", "--scale-fc")},
    {"extra": ("--decoder-input-dim", "48", "--activation-fn", "gelu_accurate", "--attention-dropout", "0.5")},
]


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_the_decoder_is_that_of_the_fairseq_model(task, settings):
    from fairseq import options

    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    config = TrainingConfig(rpe="alibi", out=Path("x"), algorithm="copy:items=3", **settings)
    plan = make_plan(config, "")
    flags = launch.training_flags(config, plan)
    args = options.parse_args_and_arch(options.get_training_parser(), flags)
    args.rpe_train_length = plan.settings.tokens  # as the task sets it
    model = TransformerRPELanguageModel.build_model(args, task)
    assert trained_decoder(config, plan, VOCABULARY) == model.decoder.config


def test_visible_pairs_are_those_of_a_mask():
    i, j = torch.arange(23)[:, None], torch.arange(23)
    for window, block in ((0, 0), (5, 0), (0, 7), (5, 7), (40, 0), (9, 4), (0, 23)):
        seen = (j <= i) & (i - j < (window or 23)) & (i // (block or 23) == j // (block or 23))
        assert visible_pairs(23, AttentionOptions(local=window, block=block)) == seen.sum()


LLAMA = BLOCK_PRESETS["llama"]
FLOPS = [{}, LLAMA, {**LLAMA, "kv_heads": 2, "head_width": 12}, WIDTHS, {"share_embeddings": True}]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("options", FLOPS, ids=str)
def test_flops_are_those_that_torch_counts(options, checkpointed):
    # the backend reference computes all pairs by plain products; the counter does not see torch's attention on a CPU
    model = make_decoder("alibi", backend="reference", checkpoint_activations=checkpointed, **options).train()
    rows, n = 2, 37
    tokens = torch.randint(4, 61, (rows, n))
    by_layer = attention_options_by_layer(model.config, model.encodings)
    flops = row_flops(model.config, by_layer, n, dense=True)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens).sum()
        assert counter.get_total_flops() == rows * flops.forward
        loss.backward()
    assert counter.get_total_flops() == rows * flops.training(checkpointed)


class TrainingStep:
    """A training step of fairseq's model and optimizer."""

    def __init__(self, arch: str, tokens: int, rows: int, vocabulary: int, rpe: str = "alibi", **settings) -> None:
        from fairseq.data import Dictionary
        from fairseq.models import ARCH_CONFIG_REGISTRY
        from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
        from fairseq.tasks.language_modeling import LanguageModelingTask

        from fairseq_rpe.criterions.lm_cross_entropy import LMCrossEntropy
        from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

        dictionary = Dictionary()
        for number in range(vocabulary - len(dictionary)):
            dictionary.add_symbol(f"w{number}")
        task = LanguageModelingTask(Namespace(add_bos_token=False), dictionary)
        args = Namespace(rpe=rpe, tokens_per_sample=tokens, **{"dropout": 0.0, **settings})
        ARCH_CONFIG_REGISTRY[f"transformer_rpe_lm_{arch}"](args)
        self.model, self.criterion = (
            TransformerRPELanguageModel.build_model(args, task).train(),
            LMCrossEntropy(task, False),
        )
        self.adam = FairseqAdam(FairseqAdamConfig(adam_betas="(0.9, 0.98)", lr=[5e-4]), list(self.model.parameters()))
        text = torch.randint(4, vocabulary, (rows, tokens + 1))
        inputs = {"src_tokens": text[:, :-1], "src_lengths": torch.full((rows,), tokens)}
        self.sample = {"net_input": inputs, "target": text[:, 1:].contiguous(), "ntokens": rows * tokens}
        decoder = self.model.decoder
        self.parameters = count_parameters(decoder.config, decoder.encodings)
        load = Workload(rows, tokens, on_gpu=False)
        self.estimate = estimate_memory(decoder.config, decoder.encodings, self.parameters, load)

    def __call__(self) -> None:
        loss, _, _ = self.criterion(self.model, self.sample)
        self.adam.backward(loss)
        self.adam.clip_grad_norm(1.0)
        self.adam.step()
        self.adam.zero_grad()

    def measure_peak(self) -> int:
        """Return the largest number of bytes that torch allocates in a step at once, besides weights and optimizer."""
        self()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):  # stable
            now += event.nbytes()
            peak = max(peak, now)
        assert peak > 0
        return peak


BLOCKS = list(itertools.product(["classic", "llama"], [False, True], ["fp32", "bf16"]))
SLOW = [("tiny", 256, 8, 4096), ("small", 256, 4, 4096), ("wiki103", 256, 4, 8192)]
PEAKS = [("tiny", 160, 4, 1024, *BLOCKS[0]), ("tiny", 160, 4, 1024, *BLOCKS[-1])]
PEAKS += [pytest.param(*size, *block, marks=pytest.mark.release) for size in SLOW for block in BLOCKS]


@pytest.mark.parametrize(("arch", "tokens", "rows", "vocabulary", "block", "checkpointed", "dtype"), PEAKS)
def test_memory_is_within_15_percent_of_the_measured_peak(arch, tokens, rows, vocabulary, block, checkpointed, dtype):
    settings = {"block": block, "checkpoint_activations": checkpointed, "compute_dtype": dtype}
    step = TrainingStep(arch, tokens, rows, vocabulary, **settings)
    m = step.estimate
    assert m.peak - m.weights - m.optimizer == pytest.approx(step.measure_peak(), rel=0.15)


def test_activations_of_dropout_key_heads_and_gelu_are_those_that_the_backward_pass_saves():
    key_heads = {"block": "llama", "kv_heads": 2, "qk_norm": "head"}
    dropout = {"dropout": 0.1, "activation_fn": "gelu"}
    for rpe, settings in (("rope", dropout), ("rope", key_heads), ("pope", key_heads)):
        step = TrainingStep("tiny", 160, 4, 96, rpe, **settings)
        weights = {p.untyped_storage().data_ptr() for p in step.model.parameters()}
        saved = {}

        def save(x, saved=saved, weights=weights):
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage  # which keeps its address from being used again
            return x

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            step.criterion(step.model, step.sample)
        measured = sum(storage.nbytes() for storage in saved.values())
        assert step.estimate.activations == pytest.approx(measured, rel=0.05)


def test_states_and_checkpoints_are_exact(tmp_path):
    step = TrainingStep("tiny", 16, 1, 96, "kerple_log", share_decoder_input_output_embed=True)
    loss, _, _ = step.criterion(step.model, step.sample)
    step.adam.backward(loss)
    assert step.estimate.gradients == sum(p.grad.nbytes for p in step.model.parameters())
    step.adam.step()
    assert step.estimate.weights == sum(p.nbytes for p in step.model.parameters())
    moments = [x for state in step.adam.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    assert step.estimate.optimizer == sum(x.nbytes for x in moments)
    torch.save({"model": step.model.state_dict(), "optimizer": step.adam.state_dict()}, tmp_path / "checkpoint.pt")
    size = 12 * step.parameters.total
    assert size <= (tmp_path / "checkpoint.pt").stat().st_size < size + 60_000


def test_the_largest_batch_fits_and_the_next_one_does_not():
    step = TrainingStep("tiny", 64, 1, 96)
    arguments = (step.model.decoder.config, step.model.decoder.encodings, step.parameters)
    memory = 5e7
    rows = largest_batch(*arguments, Workload(1, 64), memory)
    peaks = [estimate_memory(*arguments, Workload(rows + more, 64)).peak for more in (0, 1)]
    assert peaks[0] <= 0.9 * memory < peaks[1]
    assert largest_batch(*arguments, Workload(1, 64), step.parameters.total) == 0


def test_plan_multiplies_seeds_and_states_what_is_not_known():
    argv = ["plan", "--encodings", "nope rope", "--vocabulary", "4096", "--seeds", "1,2,3", "--updates", "10"]
    once, *_ = run_here(*argv, "--json").stdout.splitlines()
    run, other, total = map(json.loads, run_here(*argv, "--device", "h100", "--json").stdout.splitlines())
    assert run["tokens"] == 10 * 16 * 64 and run["seeds"] == 3 and other["rpe"] == "rope"
    assert total["total"]["training_flops"] == 3 * (run["training_flops"] + other["training_flops"])
    assert run["device_hours"] == pytest.approx(run["training_flops"] / (67e12 * 0.3) / 3600)
    assert json.loads(once)["device_hours"] is json.loads(once)["most_rows"] is run["evaluation_flops"] is None
    text = run_here(*argv, "--explain", "--tokens-per-second", "640").stdout
    assert "does not exist yet" in text and "6 runs" in text and "12·N bytes" in text
    hours = 2 * 3 * 10 * 16 * 64 / 640 / 3600
    assert f"time (estimate): {hours:.1f} device hours at 640 tokens per second" in text


def test_plan_adds_what_a_continued_training_waits_for(tmp_path, corpus):
    recipe = tmp_path / "two.toml"
    methods = '[methods.a]\nrpe = "rope"\n[methods.b]\nrpe = "rope"\ncontinues = "a"\n'
    preset = "[presets.laptop]\ntokens = 32\nupdates = 20\nlengths = [64]\n[presets.laptop.further.b]\nupdates = 10\n"
    recipe.write_text(f'title = "t"\npaper = "p"\nkind = "text"\n{methods}{preset}')
    argv = ["plan", corpus, "--recipe", recipe, "--tokens-per-second", "9", "--devices", "9", "--json"]
    a, b, total = map(json.loads, run_here(*argv).stdout.splitlines())
    assert total["total"]["hours"] == pytest.approx(a["device_hours"] + b["device_hours"])


def test_plan_counts_weights_that_are_kept_for_evaluations(corpus):
    argv = ["plan", corpus, "--rpe", "alibi", "--lengths", "64", "--updates", "20", "--json"]
    run, total = map(json.loads, run_here(*argv).stdout.splitlines())
    kept = json.loads(run_here(*argv, "--evaluate-at", "2,5").stdout.splitlines()[-1])
    weights = 2 * 4 * run["parameters"]["total"]
    assert kept["total"]["checkpoints"] == total["total"]["checkpoints"] + weights


def test_plan_reads_the_data_and_counts_a_training_and_its_evaluation(corpus):
    from fairseq_rpe.data.folder import count_tokens, read_dictionary

    argv = ["plan", str(corpus), "--rpe", "alibi", "--lengths", "32,64", "--json", "--tokens", "32"]
    run, _ = map(json.loads, run_here(*argv).stdout.splitlines())
    assert run["parameters"]["embedding"] == 128 * len(read_dictionary(corpus / "dict.txt"))
    assert [e["tokens"] for e in run["evaluations"]] == 2 * [count_tokens(corpus, "test")]
    assert run["evaluation_flops"] == pytest.approx(sum(e["flops_per_token"] * e["tokens"] for e in run["evaluations"]))


def test_a_model_that_does_not_fit_gets_a_line():
    argv = ["plan", "--rpe", "nope", "--vocabulary", "50265", "--arch", "large"]
    assert "not even one row of 512 tokens fits" in run_here(*argv, "--tflops", "1", "--memory", "2").stdout
    text = run_here(*argv, "--device", "l4", "--batch-sentences", "4096").stdout
    assert "4096 rows of 512 tokens do not fit" in text


REFUSED = {
    "--rpe nope --vocabulary 99 --device h1000": "unknown device 'h1000'",
    "--rpe nope --vocabulary 99 --device h100 --utilisation 1.5": "a number above 0 and at most 1",
    "--rpe nope --vocabulary 99 --utilisation 0.5": "give --device NAME or --tflops X",
    "--rpe nope --vocabulary 99 --device h100 --tokens-per-second 9 --utilisation 0.5": "drop --utilisation",
    "--rpe nope --vocabulary 99 --device h100 --nproc 4 --devices 2": "a run uses 4",
    "--rpe nope --vocabulary 99 --device b200": "--compute-dtype bf16",
    "--rpe nope data-bin/none": "give --vocabulary N",
    "--recipe fire-lm --rpe nope": "--rpe is for one training",
    "--recipe survey-encodings --preset paper": "has no preset 'paper'",
    "--rpe nope --vocabulary 99 -- --adaptive-input": "are not estimated",
}


@pytest.mark.parametrize("words", REFUSED)
def test_plan_refuses_what_it_cannot_estimate(words):
    assert REFUSED[words] in refusal("plan", *words.split())
