"""What else people do with a model: pipelines, Trainer, accelerate's hooks, gradients, copies. Patched as stock."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TextGenerationPipeline,
    Trainer,
    TrainingArguments,
)

import hf_accel
from hf_accel.fused.modules import NativeGatedMLP
from hf_accel.generation.hf import AcceleratedGeneration
from hf_accel.kernels import cpu as kernels

from .families import DECODER, PADDING, VOCABULARY, build, inputs, prompts

FAMILIES = ["llama", "gemma2", "gpt2"]


def greedy(model: Any) -> Tensor:
    return model.generate(**inputs("left"), max_new_tokens=6, do_sample=False)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    given = inputs("left")
    return model(**given).logits[given["attention_mask"].bool()]


def test_a_gated_mlp_whose_activation_is_a_function() -> None:
    """LFM2 calls F.silu, where others hold a module."""
    config = Lfm2Config(
        **DECODER, layer_types=["conv", "full_attention"], block_ff_dim=64, block_auto_adjust_ff_dim=False
    )
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(config).eval()
    expected = greedy(model)
    hf_accel.patch(model, weights=None)
    assert torch.equal(greedy(model), expected)
    if kernels.refusal() is None:
        assert sum(isinstance(module, NativeGatedMLP) for module in model.modules()) == 2


# -- pipelines ---------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": PADDING} | {f"w{i}": i for i in range(1, VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_text_generation_pipeline(batch_size: int) -> None:
    model, texts = build("llama"), ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11"]

    def answers() -> Any:
        pipeline = TextGenerationPipeline(model=model, tokenizer=tokenizer(), device="cpu")
        return pipeline(texts, batch_size=batch_size, max_new_tokens=4, do_sample=False)

    expected = answers()
    hf_accel.patch(model, weights=None)
    assert answers() == expected
    assert hf_accel.stats(model)["loop"] == "ragged"


# -- signatures ----------------------------------------------------------------------------------------------


OVERRIDDEN = sorted(name for name in vars(AcceleratedGeneration) if callable(getattr(LlamaForCausalLM, name, None)))


@pytest.mark.parametrize("name", [name for name in OVERRIDDEN if not name.startswith("__")])
def test_what_is_overridden_can_be_called_as_stock_s(name: str) -> None:
    """By position and by name: models call these methods in ways of their own."""
    stock, ours = (inspect.signature(getattr(kind, name)) for kind in (LlamaForCausalLM, AcceleratedGeneration))
    named = [p for p in stock.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    ours.bind(**{parameter.name: None for parameter in named})
    ours.bind(*[None for parameter in named if parameter.kind is parameter.POSITIONAL_OR_KEYWORD])


# -- training ----------------------------------------------------------------------------------------------


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    given = inputs("left")
    model(**given, labels=given["input_ids"]).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model: PreTrainedModel) -> None:
    model.train()


def checkpointing(model: PreTrainedModel) -> None:
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def dropout(model: PreTrainedModel) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3


@pytest.mark.parametrize("prepare", [plain, checkpointing, dropout])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_gradients_are_stock_s(family: str, prepare: Callable[[PreTrainedModel], None]) -> None:
    model = build(family)
    prepare(model)
    if prepare is dropout and family != "gpt2":
        model.model.embed_tokens.register_forward_hook(lambda module, args, out: nn.functional.dropout(out, 0.3))
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0  # drawn over a padded row or over a ragged one: another draw
    expected = gradients(model)
    hf_accel.patch(model, weights=None)
    got = gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_a_trainer_learns_the_same(tmp_path: Path, precision: dict[str, bool]) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in prompts(4, 8)]

    def train(model: PreTrainedModel) -> dict[str, Tensor]:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_strategy="no", **precision,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = train(build("llama"))
    got = train(hf_accel.patch(build("llama"), weights=None))
    tolerance = 1e-3 if precision else 1e-5
    for name, parameter in expected.items():
        torch.testing.assert_close(got[name], parameter, rtol=tolerance, atol=tolerance)


def test_a_trainer_that_predicts_by_generating(tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in prompts(3, 6)]

    def predictions(model: PreTrainedModel) -> Any:
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True, generation_max_length=9,
        )  # fmt: skip
        return Seq2SeqTrainer(model=model, args=arguments).predict(rows).predictions

    model = build("llama")
    expected = predictions(model)
    assert (predictions(hf_accel.patch(model, weights=None)) == expected).all()


# -- accelerate --------------------------------------------------------------------------------------------


# older transformers warn of offloaded weights
@pytest.mark.filterwarnings("ignore:You are calling .generate\\(\\):UserWarning")
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("first", ["hooks", "patch"])
@pytest.mark.parametrize("offload", [True, False])
def test_accelerate_s_hooks(offload: bool, first: str, weights: str | None) -> None:
    """Weights that are on the meta device between calls; and hooks that only move inputs."""
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    reference = logits(hf_accel.patch(copy.deepcopy(model), weights=weights))

    def hook() -> None:
        if offload:
            accelerate.cpu_offload(model, execution_device="cpu")
        else:
            accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)

    if first == "hooks":
        hook()
        hf_accel.patch(model, weights=weights)
        reference = logits(build("llama")) if weights is None else reference
    else:
        hf_accel.patch(model, weights=weights)
        hook()
    got = logits(model)
    assert (got - reference).norm() < (1e-5 if weights is None else 0.05) * reference.norm()
    assert greedy(model).shape == (3, 19)


# -- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_of_a_model_that_has_run_in_several_dtypes(family: str) -> None:
    model = hf_accel.patch(build(family), weights=None)
    expected = logits(model)
    logits(model.bfloat16())
    model = hf_accel.patch(build(family), weights=None)
    logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(logits(other), expected)
