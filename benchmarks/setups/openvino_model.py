"""OpenVINO behind as much of a transformers model's interface as the benchmarks use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .runtime import RuntimeCache, RuntimeModel


class NotFusedError(Exception):
    """OpenVINO does not run a graph as it runs those of optimum-intel."""


class OpenVINOCache(RuntimeCache):
    """An infer request, whose state holds keys and values in the plugin's own precision."""

    def __init__(self, model: OpenVINOModel, *, batch: int) -> None:
        self.model, self.batch = model, batch
        self.request = model.compiled.create_infer_request()
        self.beam_idx = np.arange(batch, dtype=np.int32)

    def decode(self, ids: Tensor, *, keep: int) -> Tensor:
        columns = ids.shape[1]
        kept = np.arange(columns - keep, columns, dtype=np.int64)
        inputs = {"input_ids": ids.numpy(), "beam_idx": self.beam_idx, "kept": kept}
        logits = self.request.infer(inputs, share_outputs=True)[0]
        self.length += columns
        return torch.from_numpy(logits)

    def fill(self, tokens: int, *, seed: int) -> None:
        config = self.model.config
        shape = (self.batch, config.num_key_value_heads, tokens, config.head_dim)
        keys = openvino.Tensor(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).numpy())
        for state in self.request.query_state():
            state.state = keys
        self.length += tokens


class OpenVINOModel(RuntimeModel):
    """read_bytes: of weights that a decode step reads, without the input embedding unless it is the head as well."""

    def __init__(self, path: Path, config: PreTrainedConfig) -> None:
        super().__init__(config)
        core = openvino.Core()
        graph = core.read_model(path)
        self.nbytes = constant_bytes(graph)
        unread = 0 if self.config.tie_word_embeddings else constant_bytes(graph, of="embed_tokens.")
        self.read_bytes = self.nbytes - unread
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self.compiled = core.compile_model(graph, "CPU", hints)
        fused = fused_attentions(self.compiled)
        if fused != self.config.num_hidden_layers:
            raise NotFusedError(
                f"OpenVINO keeps keys and values within the attention of {fused} of {self.config.num_hidden_layers} "
                "layers, and would be measured far below its best; its converter or plugin has changed"
            )

    def new_cache(self, *, batch: int, tokens: int) -> OpenVINOCache:
        """The plugin makes room as tokens come."""
        return OpenVINOCache(self, batch=batch)


def constant_bytes(graph: Any, *, of: str = "") -> int:
    """Of the constants in whose name `of` stands: scales and zero points are named after the weight they belong to."""
    constants = (node for node in graph.get_ops() if node.get_type_name() == "Constant")
    return sum(node.get_byte_size() for node in constants if of in node.get_friendly_name())


def fused_attentions(compiled: Any) -> int:
    """Attentions that read and write the state themselves, and need no copies of all keys and values in each step."""
    readers = (
        [read.get_source_output().get_node().get_rt_info() for read in node.inputs()]
        for node in compiled.get_runtime_model().get_ops()
        if kind_of(node.get_rt_info()) == "ScaledDotProductAttention"
    )
    return sum("MemoryInput" in map(kind_of, sources) for sources in readers)


def kind_of(info: Any) -> str:
    return str(info["layerType"].astype(str))
