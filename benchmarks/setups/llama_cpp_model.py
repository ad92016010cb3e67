"""llama.cpp behind as much of a transformers model's interface as the benchmarks use."""

from __future__ import annotations

import ctypes
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .runtime import RuntimeCache, RuntimeModel

FLOAT16 = 1  # GGML_TYPE_F16, in which llama.cpp keeps keys and values unless told otherwise


class LlamaCppCache(RuntimeCache):
    """A llama.cpp context: the keys and values of `batch` sequences with room for `tokens` each.

    Each sequence has cells of its own (kv_unified=False), as separate prompts have.
    """

    def __init__(self, model: LlamaCppModel, *, batch: int, tokens: int) -> None:
        self.model, self.batch = model, batch
        parameters: Any = llama_cpp.llama_context_default_params()
        parameters.n_ctx = batch * (-(-tokens // 256) * 256)
        parameters.n_seq_max = batch
        parameters.n_batch = max(512, min(2048, batch * tokens))
        parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama_cpp.llama_init_from_model(model.model, parameters)
        if not self.context:
            raise MemoryError(f"llama.cpp made no context of {parameters.n_ctx} tokens")
        self.inputs = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)

    def decode(self, ids: Tensor, *, keep: int) -> Tensor:
        rows, columns = ids.shape
        inputs = self.inputs
        inputs.n_tokens = rows * columns
        for slot, token in enumerate(ids.flatten().tolist()):
            row, column = divmod(slot, columns)
            inputs.token[slot] = token
            inputs.pos[slot] = self.length + column
            inputs.n_seq_id[slot] = 1
            inputs.seq_id[slot][0] = row
            inputs.logits[slot] = column >= columns - keep
        if llama_cpp.llama_decode(self.context, inputs):
            raise RuntimeError(f"llama.cpp could not decode {rows} x {columns} tokens after {self.length}")
        self.length += columns
        shape = (rows * keep, self.model.config.vocab_size)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), shape)
        return torch.from_numpy(logits).view(rows, keep, -1)

    def fill(self, tokens: int, *, seed: int) -> None:
        """Through llama.cpp's way to restore a state."""
        state = self.random_state(tokens, seed=seed)
        data = (ctypes.c_uint8 * len(state)).from_buffer(state)
        for row in range(self.batch):
            if llama_cpp.llama_state_seq_set_data(self.context, data, len(state), row) != len(state):
                raise RuntimeError("llama.cpp did not take the keys and values; its state format may have changed")
        self.length += tokens

    def random_state(self, tokens: int, *, seed: int) -> bytearray:
        """As llama_kv_cache::state_write lays it out: streams, cells, then K of each layer, then V of each layer."""
        config = self.model.config
        width = config.num_key_value_heads * config.head_dim
        header = self.empty_state()[:8]  # magic number and version
        cells = b"".join(struct.pack("<iII", position, 1, 0) for position in range(tokens))
        keys = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).half()
        layer = struct.pack("<iQ", FLOAT16, 2 * width) + keys.numpy().tobytes()
        layers = struct.pack("<II", 0, config.num_hidden_layers) + 2 * config.num_hidden_layers * layer
        others = bytes(4 * (self.batch - 1))  # of the other streams: no cells
        return bytearray(header + struct.pack("<II", self.batch, tokens) + cells + layers + others)

    def empty_state(self) -> bytes:
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        data = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self.context, data, size, 0)
        return bytes(data)

    def __del__(self) -> None:
        if getattr(self, "context", None):
            llama_cpp.llama_batch_free(self.inputs)
            llama_cpp.llama_free(self.context)


class LlamaCppModel(RuntimeModel):
    def __init__(self, path: Path, config: PreTrainedConfig) -> None:
        super().__init__(config)
        start()
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.nbytes = int(llama_cpp.llama_model_size(self.model))
        self.num_parameters = llama_cpp.llama_model_n_params(self.model)

    def new_cache(self, *, batch: int, tokens: int) -> LlamaCppCache:
        return LlamaCppCache(self, batch=batch, tokens=tokens)

    def __del__(self) -> None:
        if getattr(self, "model", None):
            llama_cpp.llama_model_free(self.model)


@lru_cache
def start() -> Any:
    """Once: the library, and its log to nowhere. The callback must live as long as the library."""
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    return silent
