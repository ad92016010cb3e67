"""Other runtimes of the benchmarks, llama.cpp and OpenVINO, compute what stock does on the same weights. No clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, DynamicCache, LlamaConfig, PreTrainedModel

from benchmarks.harness.bench import Bench
from benchmarks.harness.checks import random_tokens
from benchmarks.harness.models import load_model, weight_bytes
from benchmarks.harness.settings import Settings
from benchmarks.setups import SETUPS, llama_cpp, openvino
from benchmarks.setups.base import Setup
from benchmarks.setups.encoder_graphs import runtimes, why_missing
from benchmarks.setups.gguf_file import gguf_refuses
from benchmarks.setups.model_folder import folder_of
from benchmarks.setups.openvino_file import openvino_file, openvino_refuses
from benchmarks.topics.encoders import Encoder, cosine, hidden_of, inputs_of
from hf_accel.patching.twin import twin

LLAMA_CPP, OPENVINO = llama_cpp.SETUPS[0], openvino.SETUPS[0]
QUANTIZED = ["llama.cpp Q8_0", "llama.cpp Q4_0", "OpenVINO int8", "OpenVINO int4"]
LEAST_CORRELATION = {"8_0": 0.99, "int8": 0.99, "4_0": 0.6, "int4": 0.9}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model("tiny")


@pytest.fixture(scope="module", params=[LLAMA_CPP, OPENVINO], ids=lambda setup: setup.name)
def runtime(request: pytest.FixtureRequest, model: PreTrainedModel) -> SimpleNamespace:
    """A setup of 16 bits and its model."""
    setup: Setup = request.param
    if reason := setup.refuses(model.config):
        pytest.skip(reason)
    return SimpleNamespace(setup=setup, model=setup.prepare(twin(model)))


@torch.no_grad()
def test_it_runs_the_same_model(runtime: SimpleNamespace, model: PreTrainedModel) -> None:
    ids = random_tokens(model, batch=3, length=9)
    logits = runtime.model(input_ids=ids).logits
    torch.testing.assert_close(logits, model(input_ids=ids).logits.float(), atol=0.03, rtol=0.03)
    last = runtime.model(input_ids=ids, logits_to_keep=1).logits
    assert last.shape == (3, 1, 512)
    assert torch.allclose(last, logits[:, -1:], atol=1e-3)


@torch.no_grad()
def test_it_goes_on_from_what_it_has_read(runtime: SimpleNamespace, model: PreTrainedModel) -> None:
    ids = random_tokens(model, batch=2, length=12)
    cache = runtime.setup.new_cache(runtime.model, batch=2, tokens=12)
    pieces = [runtime.model(input_ids=piece, past_key_values=cache).logits for piece in ids.split([5, 1, 6], dim=1)]
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(pieces, 1), model(input_ids=ids).logits.float(), atol=0.03, rtol=0.03)


@torch.no_grad()
def test_it_reads_the_keys_and_values_it_was_filled_with(runtime: SimpleNamespace, model: PreTrainedModel) -> None:
    cache = runtime.setup.filled_cache(runtime.model, batch=2, tokens=21, room=4, seed=3)
    ids = random_tokens(model, batch=2, length=1)
    logits = runtime.model(input_ids=ids, past_key_values=cache).logits
    keys, values = filled_with(runtime.setup)
    same = DynamicCache(config=model.config)
    for layer in range(2):
        same.update(keys, values, layer)
    expected = model(input_ids=ids, past_key_values=same).logits.float()
    torch.testing.assert_close(logits, expected, atol=0.03, rtol=0.03)
    assert not torch.allclose(logits, model(input_ids=ids).logits.float(), atol=0.1)


def filled_with(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [2, 2, 21, 64] as transformers orders them, from the same seed."""
    generator = torch.Generator().manual_seed(3)
    if setup is OPENVINO:
        values = torch.randn(2, 2, 21, 64, generator=generator).bfloat16()
        return values, values
    values = torch.randn(21, 128, generator=generator).bfloat16().view(21, 2, 64)
    values = values.transpose(0, 1).expand(2, -1, -1, -1)
    # llama.cpp's order of a rotated head
    return torch.cat([values[..., 0::2], values[..., 1::2]], dim=-1), values


class Tokens:
    """A streamer that keeps what it is handed."""

    def __init__(self) -> None:
        self.put_calls: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.put_calls.append(value)


def test_it_generates_greedily_from_where_the_cache_ends(runtime: SimpleNamespace, model: PreTrainedModel) -> None:
    prompt, streamer = random_tokens(model, batch=2, length=6), Tokens()
    output = runtime.model.generate(prompt, max_new_tokens=3, streamer=streamer)
    for column in range(6, 9):
        assert torch.equal(output[:, column], runtime.model(input_ids=output[:, :column]).logits[:, -1].argmax(-1))
    assert [call.shape for call in streamer.put_calls] == [(2, 6), (2, 1), (2, 1), (2, 1)]
    cache = runtime.setup.new_cache(runtime.model, batch=2, tokens=20)
    runtime.model(input_ids=prompt[:, :5], past_key_values=cache)
    again = runtime.model.generate(prompt, max_new_tokens=3, streamer=streamer, past_key_values=cache)
    assert torch.equal(again, output)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_is_smaller_and_near(name: str, model: PreTrainedModel) -> None:
    setup = next(setup for setup in SETUPS if setup.name == name)
    if reason := setup.refuses(model.config):
        pytest.skip(reason)
    bench = Bench(Settings(model="tiny", context=20, setups=(name,)))
    entrant = bench.entrants[name]  # verified by its tolerance
    assert setup.read_bytes(entrant.model) < setup.weight_bytes(entrant.model) < weight_bytes(model)
    least = next(value for kind, value in LEAST_CORRELATION.items() if name.endswith(kind))
    assert entrant.verified["correlation"] > least


def test_the_files_of_twins_lie_in_one_folder(model: PreTrainedModel) -> None:
    folder = folder_of(model)
    assert folder.is_dir() and folder_of(twin(model)) == folder != folder_of(load_model("tiny"))


# -- llama.cpp -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "type 'dynamic'"),
        ({"model_type": "qwen3"}, "only llama, mamba2 and deepseek_v3 models are measured as GGUF"),
        ({}, None),
    ],
)
def test_models_that_are_not_measured_are_refused(keywords: dict[str, Any], reason: str | None) -> None:
    config = LlamaConfig(**{name: value for name, value in keywords.items() if name != "model_type"})
    config.model_type = keywords.get("model_type", "llama")
    refusal = gguf_refuses(config)
    assert refusal is None if reason is None else reason in str(refusal)


# -- OpenVINO ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(model: PreTrainedModel) -> Any:
    if reason := OPENVINO.refuses(model.config):
        pytest.skip(reason)
    return openvino_file(twin(model), "bf16")


def test_openvino_reads_all_weights_but_the_input_embedding(path: Any, model: PreTrainedModel) -> None:
    from benchmarks.setups.openvino_model import OpenVINOModel

    made = OpenVINOModel(path, model.config)
    assert made.nbytes - made.read_bytes == 2 * 512 * 256
    # norms in float32, but for those whose weights are all 1, and numbers of the graph
    assert made.nbytes == pytest.approx(weight_bytes(model), rel=0.01)


def test_converting_leaves_the_weights_as_they_are(path: Any, model: PreTrainedModel) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    same = zip(model.parameters(), load_model("tiny").parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)


def test_a_graph_that_openvino_does_not_fuse_is_not_measured(path: Any, model: PreTrainedModel) -> None:
    from benchmarks.setups.openvino_model import NotFusedError, OpenVINOModel

    more = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 3})
    with pytest.raises(NotFusedError, match="within the attention of 2 of 3 layers"):
        OpenVINOModel(path, more)


def test_other_models_are_not_converted() -> None:
    config = LlamaConfig()
    assert openvino_refuses(config) is None
    config.model_type = "qwen3"
    assert openvino_refuses(config) == "only llama models are converted to OpenVINO here, this is qwen3"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime_int8", "openvino", "openvino_int8"])
def test_a_graph_of_an_encoder_computes_the_same_at_other_sizes(name: str, tmp_path: Path) -> None:
    if reason := why_missing(name):
        pytest.skip(reason)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    encoder = Encoder(lambda: BertModel(BertConfig(**sizes), add_pooling_layer=False), {})
    torch.manual_seed(0)
    model = encoder.make().eval()
    few, other, one = (inputs_of(encoder, lengths) for lengths in ([5, 8], [3, 20, 9], [16]))
    call = runtimes(model, few, [few, other], tmp_path)[name]()
    for given in (few, other, one):
        close = cosine(call(given), hidden_of(model)(given), given)
        assert close > (0.99 if name.endswith("int8") else 0.999999)
