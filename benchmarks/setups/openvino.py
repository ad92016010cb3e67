"""OpenVINO on the CPU, as its own tools make a model for it: the same weights, and as NNCF compresses them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_accel.hardware import detect

from .base import missing
from .openvino_file import openvino_file, openvino_refuses
from .runtime import RuntimeSetup

INTEGER_SETS = {"avx512_vnni", "avx_vnni"}  # with one of them it rounds activations to INT8 too, unless told otherwise


class OpenVINO(RuntimeSetup):
    kv_dtype = "int8"  # in which its CPU plugin keeps keys and values unless told otherwise

    def __init__(self, kind: str, *, tolerance: float) -> None:
        self.name = f"OpenVINO {kind}"
        self.kind = kind
        self.tolerance = tolerance
        rounds = kind != "bf16" and not INTEGER_SETS.isdisjoint(detect().instruction_sets)
        self.multiplies = "integer" if rounds else "float"

    def refuses(self, config: PreTrainedConfig) -> str | None:
        return missing("openvino") or missing("nncf") or openvino_refuses(config)

    def prepare(self, model: PreTrainedModel) -> Any:
        from .openvino_model import OpenVINOModel

        return OpenVINOModel(openvino_file(model, self.kind), model.config)

    def read_bytes(self, model: Any) -> int:
        return int(model.read_bytes)


SETUPS = (OpenVINO("bf16", tolerance=0.1), OpenVINO("int8", tolerance=0.15), OpenVINO("int4", tolerance=0.9))
