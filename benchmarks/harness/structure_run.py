"""Prints, as JSON, which files of hf_accel its calls pass through: run by structure.py, in a process of its own.

hf_accel is the one that PYTHONPATH names, of whatever commit: nothing of it is used but patch and generate.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hf_accel

PACKAGE = Path(hf_accel.__file__).parent
STEPS = (4, 5)  # passes of the model between which the step is looked at
NEW_TOKENS = 8

public = sorted(hf_accel.__all__)
eager = sorted(name for name in public if name in vars(hf_accel))


def files_of(call: Callable[[], object], *, between: tuple[int, int] | None = None) -> list[str]:
    """Files of hf_accel whose functions run in a call, or in it from one pass of the model to another."""
    found: set[str] = set()
    passes = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal passes
        code = frame.f_code
        if event != "call":
            return
        passes += code.co_qualname == "LlamaForCausalLM.forward"
        if (between is None or between[0] <= passes < between[1]) and code.co_filename.startswith(str(PACKAGE)):
            found.add(str(Path(code.co_filename).relative_to(PACKAGE)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(found)


def main() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 41)[None]

    def generate() -> object:
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)

    for name in public:
        getattr(hf_accel, name)  # loaded late: the code of a module is no function that patch() runs
    found = {"patch": files_of(lambda: hf_accel.patch(model))}
    generate()  # what is imported or built once
    found["generate"] = files_of(generate)
    found["step"] = files_of(generate, between=STEPS)
    print(json.dumps({**found, "public": public, "eager": eager}))


if __name__ == "__main__":
    main()
