"""The model card of a checkpoint that transformers can read only after `import hf_accel`.

transformers 5.17 to 5.23 has no entry point for quantization methods: it knows its own ones, and those that were
registered in the process. Code in the checkpoint itself could register ours, but a user would have to trust it with
trust_remote_code=True.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..hardware.atomic import replaced_file
from ..undo.journal import Mixin

METHOD = "hf_accel"  # of quantization, in config.json
CARD = """---
library_name: transformers
tags:
- hf_accel
---

Run `import hf_accel` (`pip install hf_accel`) before `from_pretrained`: transformers alone cannot read these weights.
"""


class WritesModelCard(Mixin):
    """Is mixed into the class of a model with quantized layers, before the original class."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save as in transformers, and write a model card, if there is none, that says how to load it."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]
        if is_main_process:
            write_model_card(Path(save_directory))


def write_model_card(folder: Path) -> None:
    """Write README.md into the folder of a checkpoint of ours that has none. A user's own is never written to."""
    config, card = folder / "config.json", folder / "README.md"
    if card.exists() or not config.is_file():  # there is a card, or nothing was saved
        return
    described = json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}
    if described.get("quant_method") == METHOD:
        with replaced_file(card) as unfinished:
            unfinished.write_text(CARD, encoding="utf-8")
