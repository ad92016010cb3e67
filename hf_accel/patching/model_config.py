"""config.json of a checkpoint: what it must not say, found before transformers makes anything of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..errors import HfAccelError
from .originals import check_inside, indexed

# Numbers of what transformers makes one after the other: a wrong one would keep it busy for days.
COUNTS = re.compile(r"(^|_)(layers?|blocks?|depths?|stages|experts)$")
MOST = 20_000  # Doge has 16,384 experts


def read_config(path: str | os.PathLike[str], **hub: Any) -> PreTrainedConfig:
    """The config of a checkpoint. hub: keywords of from_pretrained.

    Raises HfAccelError for numbers of layers that no model has, and for shards that lie outside of the folder.
    """
    if Path(path).is_dir():
        for index in Path(path, hub.get("subfolder") or "").glob("*.index*.json"):
            indexed(index)
    content, _ = PreTrainedConfig.get_config_dict(path, **hub)
    for name, value in _numbers(content):
        if COUNTS.search(name.rpartition(".")[2]) and value > MOST:
            raise HfAccelError(
                f"config.json of {os.fspath(path)!r} says {name}={value}, and no model has more than {MOST:,}; copy "
                "the checkpoint again"
            )
    if content.get("transformers_weights") is not None:
        check_inside(content["transformers_weights"], "transformers_weights in config.json")
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, **hub)
    return config


def _numbers(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in it, by their names."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", value
