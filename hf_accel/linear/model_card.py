"""The model card of a checkpoint that transformers can read only after `import hf_accel`.

transformers 5.17 to 5.24 has no entry point for quantization methods: it knows its own ones, and those that were
registered in the process. Code in the checkpoint itself could register ours, but a user would have to trust it with
trust_remote_code=True.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..hardware.atomic import replaced_file

METHOD = "hf_accel"  # of quantization, in config.json
CARD = """---
library_name: transformers
tags:
- hf_accel
---

Run `import hf_accel` (`pip install hf_accel`) before `from_pretrained`: transformers alone cannot read these weights.
"""


def write_model_card(folder: Path) -> None:
    """Write README.md into the folder of a checkpoint of ours that has none. A user's own is never written to."""
    config, card = folder / "config.json", folder / "README.md"
    if card.exists() or not config.is_file():  # there is a card, or nothing was saved
        return
    described = json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}
    if described.get("quant_method") == METHOD:
        with replaced_file(card) as unfinished:
            unfinished.write_text(CARD, encoding="utf-8")
