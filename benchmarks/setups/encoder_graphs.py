"""Encoders in other runtimes, called directly on a graph of a transformers model: ONNX Runtime and OpenVINO.

Each runtime gets as many threads as torch has. The files of ONNX Runtime lie in a folder that the caller removes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .base import missing

Inputs = dict[str, Tensor]
Call = Callable[[Inputs], Tensor]  # returns the last hidden states
OPSET = 18


class Exported(nn.Module):
    """What is traced: inputs in their order, and nothing but the last hidden states."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden: Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state
        return hidden


def runtimes(
    model: nn.Module, inputs: Inputs, calibration: list[Inputs], folder: Path
) -> dict[str, Callable[[], Call]]:
    """What makes each way to run the model, by name: with weights in float32, and with INT8.

    inputs: a batch of several rows that the model is traced with; calibration: batches that NNCF measures ranges on.
    """
    exported = Exported(model, list(inputs)).eval()
    onnx = cache(lambda: onnx_file(exported, inputs, folder / "float32.onnx"))
    graph = cache(lambda: openvino_graph(exported, inputs))
    return {
        "onnxruntime": lambda: by_onnxruntime(onnx()),
        "onnxruntime_int8": lambda: by_onnxruntime(dynamic_int8(onnx(), folder / "int8.onnx")),
        "openvino": lambda: by_openvino(graph(), INFERENCE_PRECISION_HINT="f32"),
        "openvino_int8": lambda: by_openvino(nncf_int8(graph(), calibration)),
    }


def why_missing(name: str) -> str | None:
    """None, or which package is missing for the runtime of that name."""
    needed = ("onnxruntime", "onnx") if name.startswith("onnxruntime") else ("openvino", "nncf")
    return next((reason for package in needed if (reason := missing(package))), None)


def onnx_file(exported: Exported, inputs: Inputs, path: Path) -> Path:
    axes = {name: dict(enumerate(("batch", "tokens"))) if x.ndim == 2 else {0: "batch"} for name, x in inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what tracing takes for constant; the outputs are checked
        torch.onnx.export(
            exported, tuple(inputs.values()), path, dynamo=False, opset_version=OPSET,
            input_names=list(inputs), output_names=["hidden"], dynamic_axes=axes,
        )  # fmt: skip
    return path


def dynamic_int8(source: Path, target: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # it advises to run a preparation that infers shapes
    try:
        quantize_dynamic(source, target, weight_type=QuantType.QInt8, per_channel=True)
    finally:
        logging.root.setLevel(level)
    return target


def by_onnxruntime(path: Path) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # else it slows the next one's turn
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda given: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in given.items()})[0])


def openvino_graph(exported: Exported, inputs: Inputs) -> Any:
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return openvino.convert_model(exported, example_input=tuple(inputs.values()))


def nncf_int8(graph: Any, calibration: list[Inputs]) -> Any:
    """Weights and activations of 8 bits, by NNCF's settings for transformers."""
    import nncf

    nncf.set_log_level(logging.ERROR)
    data = nncf.Dataset([[x.numpy() for x in batch.values()] for batch in calibration])
    return nncf.quantize(graph, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(calibration))


def by_openvino(graph: Any, **hints: str) -> Call:
    import openvino

    compiled = openvino.Core().compile_model(
        graph, "CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads(), **hints}
    )
    request = compiled.create_infer_request()
    return lambda given: torch.from_numpy(request.infer([x.numpy() for x in given.values()], share_outputs=True)[0])
