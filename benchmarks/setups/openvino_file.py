"""A Llama of transformers as OpenVINO's intermediate representation, by its converter from torch and by NNCF.

The graph is the one that optimum-intel makes, which does not take every release of transformers that is measured here:
keys and values are state of the model, and weights stay in 16 bits while all else is written in float32.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .model_folder import model_file

COMPRESSIONS: dict[str, dict[str, Any]] = {  # embedding and head of an int4 model get 8 bits, by NNCF's default
    "int8": {"mode": "int8_sym"},
    "int4": {"mode": "int4_sym", "group_size": 128},
}
LOWEST = -65504.0  # float16's, so that it is finite in each precision that a plugin may choose


def openvino_refuses(config: PreTrainedConfig) -> str | None:
    """None, or why a model of this config is not converted here."""
    if config.model_type != "llama":
        return f"only llama models are converted to OpenVINO here, this is {config.model_type}"
    return None


def openvino_file(model: PreTrainedModel, kind: str) -> Path:
    """The model as "bf16" (as it is), "int8" or "int4", in a folder that is removed when the process ends.

    A file, and not the graph in memory: the plugin recognizes rotary embeddings only in a graph that was read.
    """
    return model_file(model, f"{kind}.xml", plain="bf16.xml", write=write, quantize=partial(compress, kind=kind))


def compress(source: Path, target: Path, kind: str) -> None:
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    keywords = dict(COMPRESSIONS[kind])
    mode = nncf.CompressWeightsMode(keywords.pop("mode"))
    compressed = nncf.compress_weights(openvino.Core().read_model(source), mode=mode, **keywords)
    openvino.save_model(compressed, target, compress_to_fp16=False)


def write(model: PreTrainedModel, path: Path) -> None:
    import openvino

    converted = convert(model)
    make_stateful(converted, model.config)
    openvino.save_model(converted, path, compress_to_fp16=False)


@torch.no_grad()
def convert(model: PreTrainedModel) -> Any:
    """A graph with keys and values as inputs and outputs. The model is changed while it is traced, and its norms stay
    in float32."""
    import openvino
    from openvino.frontend.pytorch import patch_model

    config: Any = model.config
    # OpenVINO keeps keys and values within its attention only if the rows are picked by an input of 32 bits
    beam_idx = torch.arange(2, dtype=torch.int32)
    past = [torch.zeros(2, config.num_key_value_heads, 3, config.head_dim)] * (2 * config.num_hidden_layers)
    example = (torch.ones(2, 4, dtype=torch.int64), beam_idx, torch.arange(4), past)
    patch_model.__make_16bit_traceable(model)
    try:
        with warnings.catch_warnings():
            # tracing warns of what it takes for constant: whether there is a mask, and how many layers and heads
            warnings.simplefilter("ignore")
            return openvino.convert_model(Traced(model), example_input=example)
    finally:
        patch_model.unpatch_model(model, "_openvino_module_extension_patch_orig_forward")


def make_stateful(graph: Any, config: Any) -> None:
    """Keys and values become state that is empty at first, of as many sequences as the tokens have rows."""
    import numpy as np
    from openvino import opset13 as ops
    from openvino.passes import MakeStateful, Manager

    manager = Manager()
    manager.register_pass(MakeStateful(list(zip(graph.get_parameters()[3:], graph.get_results()[1:], strict=True))))
    manager.run_passes(graph)
    rows = ops.gather(ops.shape_of(graph.get_parameters()[0]), np.array([0]), np.array(0))
    sizes = np.array([config.num_key_value_heads, 0, config.head_dim])
    empty = ops.broadcast(np.float32(0), ops.concat([rows, sizes], 0))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    graph.validate_nodes_and_infer_types()


class Traced(nn.Module):
    """What is traced: the model over keys and values that are handed in and out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, beam_idx: Tensor, kept: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Logits [B, kept, vocab] of the tokens [B, T] at the indices `kept`, then keys and values of each layer."""
        model: Any = self.model
        start, length = past[0].shape[2], input_ids.shape[1]
        rows, columns = torch.arange(start, start + length), torch.arange(start + length)
        cache = TracedCache(past, beam_idx)
        hidden = model.model(
            input_ids=input_ids,
            position_ids=rows[None],
            attention_mask=torch.where(columns[None] <= rows[:, None], 0.0, LOWEST)[None, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return (model.lm_head(hidden.index_select(1, kept)), *cache.present)


class TracedCache:
    """What a layer asks of a cache. Sequences are picked by beam_idx, as OpenVINO's fused attention expects it."""

    is_compileable = False

    def __init__(self, past: list[Tensor], beam_idx: Tensor) -> None:
        self.past, self.beam_idx = past, beam_idx
        self.present: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        before = (tensor.index_select(0, self.beam_idx) for tensor in self.past[2 * layer : 2 * layer + 2])
        now = [torch.cat(pair, dim=2) for pair in zip(before, (keys, values), strict=True)]
        self.present += now
        return now[0], now[1]

    def get_seq_length(self, *_: Any) -> int:
        return self.past[0].shape[2]
