"""Loads the one model that is served, for transformers' server."""

from __future__ import annotations

import time
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.model_manager import ModelManager
from transformers.distributed import DistributedConfig

from ...checkpoints.load import load, load_tokenizer
from ...errors import UnsupportedError
from ...generation.hf import Engine
from ...parallel.relay import Relay
from ..limits import Limits
from ..ranks import LeadingEngine
from ..service import Service


def load_fast_tokenizer(path: str, *, chat_template: str | None = None) -> Any:
    """Load a checkpoint's tokenizer. chat_template: the text of a template to use instead of its own.

    Raises UnsupportedError for a tokenizer that cannot decode token by token.
    """
    tokenizer = load_tokenizer(path)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise UnsupportedError(f"{path}: {type(tokenizer).__name__} is no fast tokenizer, which streams need")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def load_service(
    path: str,
    *,
    name: str | None = None,
    limits: Limits | None = None,
    chat_template: str | None = None,
    engine: dict[str, Any] | None = None,
    **keywords: Any,
) -> Service:
    """Load and patch a checkpoint by hf_accel.load(path, **keywords), and start an Engine on it.

    name: what clients call the model; left out, its path. engine: keywords of Engine, and relay=, the way to the other
    ranks if the model is to be split over them: all load the same, and those behind the first one `follow` its Engine.
    Raises UnsupportedError for a model that an Engine cannot serve.
    """
    limits = limits or Limits()
    tokenizer = load_fast_tokenizer(path, chat_template=chat_template)
    settings = {"tokenizer": tokenizer, "max_running": limits.max_running, **(engine or {})}
    relay: Relay | None = settings.pop("relay", None)
    if relay is not None:
        keywords["distributed_config"] = DistributedConfig(tp_size=relay.ranks.size, tp_plan="auto")
    model = load(path, **keywords)
    model.eval()
    leading = relay if relay is not None and relay.leads else None
    served = Engine(model, **settings) if leading is None else LeadingEngine(model, relay=leading, **settings)
    return Service(served, tokenizer, name or path, limits)


class OneModel(ModelManager):
    """transformers' manager of models, with one model that is never unloaded."""

    def __init__(self, service: Service) -> None:
        super().__init__(model_timeout=-1)
        self._service = service
        self._created = int(time.time())

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._service.engine.model, self._service.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the served model as an entry of OpenAI's list of models."""
        context = self._service.context
        found = {"id": self._service.name, "object": "model", "created": self._created, "owned_by": "hf_accel"}
        return [found if context is None else {**found, "max_model_len": context}]

    def shutdown(self) -> None:
        """End the Engine; called when the server ends."""
        self._service.close()
