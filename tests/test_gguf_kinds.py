"""Mamba 2 and DeepSeek V3 as GGUF files: gguf reads them back, and llama.cpp computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from benchmarks.setups.gguf_kinds import KINDS, write_kind

WORDS = 512
NO_MATRICES = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt", "ssm_norm", "norm", "bias", "ffn_gate_inp", "exp_probs_b")


def models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    mamba = Mamba2Config(
        vocab_size=WORDS, hidden_size=256, num_hidden_layers=2, num_heads=8, head_dim=64, state_size=64, n_groups=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    deepseek = DeepseekV3Config(
        vocab_size=WORDS, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=128, qk_rope_head_dim=32,
        qk_nope_head_dim=32, v_head_dim=32, routed_scaling_factor=1.0,
    )  # fmt: skip
    made: list[PreTrainedModel] = [Mamba2ForCausalLM(mamba), DeepseekV3ForCausalLM(deepseek)]
    return {model.config.model_type: model.bfloat16().float().eval() for model in made}


@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_are_in_the_file(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = models()[kind]
    write_kind(model, tmp_path / "model.gguf")
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    stored = sum(tensor.n_elements for tensor in tensors)
    extra = sum(buffer.numel() for name, buffer in model.named_buffers() if "rotary" not in name)
    assert stored == sum(parameter.numel() for parameter in model.parameters()) + extra
    bfloat16 = gguf.GGMLQuantizationType.BF16
    for tensor in tensors:
        assert (tensor.tensor_type == bfloat16) == (not any(part in tensor.name for part in NO_MATRICES)), tensor.name


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_the_same(kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = models()[kind]
    write_kind(model, tmp_path / "model.gguf")
    peer: Any = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    ids = torch.randint(0, WORDS, (20,))
    peer.eval(ids.tolist())
    found = torch.tensor(peer.scores[: len(ids)].copy())
    peer.close()
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    assert float((found - expected).norm() / expected.norm()) < 0.02
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
