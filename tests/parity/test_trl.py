"""TRL's trainers that generate over a patched model, with transformers' continuous batching too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import hf_accel

from .families import VOCABULARY, build

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages


def words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w0")


def step(folder: Path, model: Any, **more: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What a step of GRPO samples, with one token to choose from, and the weights after it."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    sampled: list[str] = []

    def reward(completions: list[str], **rest: Any) -> list[float]:
        sampled.extend(completions)
        return [float(number) for number in range(len(completions))]

    args = trl.GRPOConfig(
        str(folder), max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
        per_device_train_batch_size=4, gradient_checkpointing=False, num_generations=2, max_completion_length=6,
        learning_rate=1e-2, top_k=1, seed=3, **more,
    )  # fmt: skip
    data = Dataset(InMemoryTable.from_pydict({"prompt": ["w3 w4 w5", "w6 w7 w8 w9"]}), fingerprint="prompts")
    trl.GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=words()).train()
    return sampled, {name: value.detach().clone() for name, value in model.named_parameters()}


def test_a_step_of_grpo_with_continuous_batching(tmp_path: Path) -> None:
    """TRL always says max_memory_percent=, which has no effect on a CPU."""
    sampled, _ = step(tmp_path / "stock", build("llama"))
    model, before = hf_accel.patch(build("llama"), weights=None), build("llama").state_dict()
    found, weights = step(tmp_path / "ours", model, use_transformers_continuous_batching=True)
    assert found == sampled and len(found) == 4
    assert hf_accel.stats(model)["loop"] == "ragged"
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert any(not torch.equal(value, before[name]) for name, value in weights.items())
