"""The model that is served: loaded, alone or over several ranks.

The first rank has the clients: its requests also go to the Engines of the others.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import AutoProcessor, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig

from ...cache.hf.room import share_settings
from ...checkpoints.load import load, load_tokenizer
from ...checkpoints.text_encoder import encodes, load_text_encoder
from ...config import CacheConfig
from ...errors import HfAccelError, HfAccelWarning, UnsupportedError
from ...generation.engine.stream import Request
from ...generation.hf import Engine
from ...generation.hf.engine import TOKEN_BUDGET
from ...parallel.relay import Relay
from ...tensors import model_device
from ...undo.state import state_of
from ..http_server import DrainingServer
from ..limits import Limits
from ..rows import RowService
from ..service import ModelService, Service
from .transcriptions import sound_service, transcribes

# Starts what computes for a loaded model. It gets the share of a GPU's free memory that its cache may take.
Start = Callable[[float], ModelService]


def load_fast_tokenizer(path: str) -> Any:
    """Load a checkpoint's tokenizer. Raises UnsupportedError for one that cannot decode token by token."""
    tokenizer = load_tokenizer(path)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise UnsupportedError(f"{path}: {type(tokenizer).__name__} is no fast tokenizer, which streams need")
    return tokenizer


def load_processor(path: str, tokenizer: Any) -> Any:
    """Load what makes prompts of texts with images for a checkpoint; None if it has nothing such.

    Its chat template, which knows where images stand, becomes the tokenizer's.
    """
    if path.endswith(".gguf"):
        return None
    try:
        processor = AutoProcessor.from_pretrained(path)
    except Exception:  # transformers raises of many kinds where a checkpoint has none, or a package is missing
        return None
    if getattr(processor, "image_processor", None) is None:
        return None
    tokenizer.chat_template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    return processor


def load_served(path: str, **given: Any) -> ModelService:
    """Load what a checkpoint is for, and start what computes; see `load_to_start`."""
    return load_to_start(path, **given)(1.0)


def load_to_start(path: str, **given: Any) -> Start:
    """Load what a checkpoint is for: Whisper or a text encoder with its queue, or what writes text.

    given: the keywords of load_text_to_start. Raises UnsupportedError for what these do not take.
    """
    sounds = transcribes(path)
    if not sounds and not encodes(path):
        return load_text_to_start(path, **given)
    limits = given.pop("limits", None) or Limits()
    name, template, engine = (given.pop(key, None) for key in ("name", "chat_template", "engine"))
    if template is not None or (engine or {}).get("relay") is not None:
        what = "chat_template" if template is not None else "tensor_parallel"
        raise UnsupportedError(f"{what} is for models that write text, and {path} is none; leave it out")
    if sounds:
        return sound_service(path, name or path, limits, **given)
    encoder = load_text_encoder(path, **given)
    return lambda share: RowService(encoder, name or path, limits)


def load_service(path: str, **given: Any) -> Service:
    """Load and patch a checkpoint that writes text, and start an Engine on it; see `load_text_to_start`."""
    return load_text_to_start(path, **given)(1.0)


def load_text_to_start(
    path: str,
    *,
    name: str | None = None,
    limits: Limits | None = None,
    chat_template: str | None = None,
    engine: dict[str, Any] | None = None,
    **keywords: Any,
) -> Callable[[float], Service]:
    """Load and patch a checkpoint by hf_accel.load(path, **keywords), and return what starts an Engine on it.

    name: what clients call the model; left out, its path. chat_template: the text of a template to use instead of the
    checkpoint's own. engine: keywords of Engine, and relay=, the way to the other
    ranks if the model is to be split over them: all load the same, and those behind the first one `follow` its Engine.
    Raises UnsupportedError for a model that an Engine cannot serve.
    """
    limits = limits or Limits()
    tokenizer = load_fast_tokenizer(path)
    processor = load_processor(path, tokenizer)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    settings = {"tokenizer": tokenizer, "max_running": limits.max_running, **(engine or {})}
    relay: Relay | None = settings.pop("relay", None)
    if relay is not None:
        keywords["distributed_config"] = DistributedConfig(tp_size=relay.ranks.size, tp_plan="auto")
    model = load(path, **keywords)
    model.eval()
    beams = model.generation_config.num_beams or 1
    if beams > 1:
        warnings.warn(
            f"generation_config.json of {path} asks for num_beams={beams}, and a server searches with one: answers "
            "can differ from those of hf-accel generate; set it to 1 there to have the same",
            HfAccelWarning,
            stacklevel=2,
        )
    leading = relay if relay is not None and relay.leads else None

    def start(share: float) -> Service:
        if share < 1:
            settings.setdefault("max_tokens", _tokens_of(model, share))
        served = Engine(model, **settings) if leading is None else LeadingEngine(model, relay=leading, **settings)
        return Service(served, tokenizer, name or path, limits, processor=processor)

    return start


def _tokens_of(model: Any, share: float) -> int | None:
    """Return the tokens of a cache in a share of the free memory; None if it grows as needed."""
    settings = state_of(model).generation.cache or CacheConfig()
    return share_settings(model, settings, model_device(model), rows=TOKEN_BUDGET, share=share).max_tokens


# -- ranks --------------------------------------------------------------------------------------------


class LeadingEngine(Engine):
    """The Engine of the first rank: its requests are also submitted to the Engines of the other ranks, by `follow`.

    A request that is cancelled here is cancelled everywhere, as the ranks agree before each pass.
    """

    def __init__(self, model: Any, *, relay: Relay, **settings: Any) -> None:
        """settings: keywords of Engine, the same on all ranks."""
        super().__init__(model, **settings)
        self._relay = relay
        self._order = threading.Lock()

    def submit(self, prompt: str | Iterable[int] | Tensor | Mapping[str, Any], **settings: Any) -> Request:
        """See Engine.submit. Raises UnsupportedError for settings that cannot be pickled."""
        ids, inputs = self._prompt(prompt)
        sent = ids if inputs is None else {**(inputs.unread or {}), "input_ids": ids}
        try:
            pickle.dumps(settings)
        except Exception as error:
            raise UnsupportedError(f"{settings} cannot be sent to the other ranks: {error}; leave it out") from error
        with self._order:  # which is the same on all ranks
            request = super().submit(sent, **settings)
            self._relay.send((sent, settings))
        return request


def join_ranks(size: int, *, timeout: float) -> Relay | None:
    """Meet the processes that torchrun has started for one model; None for a process that is alone.

    timeout: seconds that a rank may be silent. Raises UnsupportedError unless `size` processes were started.
    """
    started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if started != size:
        raise UnsupportedError(
            f"--tensor-parallel {size} is the number of processes that torchrun starts, and here it is {started}: run "
            "torchrun --nproc-per-node N -m hf_accel serve ... --tensor-parallel N"
        )
    if size == 1:
        return None
    if torch.accelerator.is_available():  # each rank has one of its own
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(timeout=timedelta(seconds=timeout))
    return Relay(timeout=timeout)


@contextmanager
def leading(relay: Relay | None, service: ModelService, server: DrainingServer) -> Iterator[None]:
    """Let the other ranks follow the Engine of a service while the block serves it, and end with it.

    A rank that is lost ends all requests and the server: the block then ends, and LostRankError is raised. relay:
    None for a model that this process has alone.
    """
    if relay is None:
        yield
        return
    found: list[BaseException] = []

    def lost(error: HfAccelError) -> None:
        found.append(error)
        service.engine.loop.fail(error)
        server.handle_exit(signal.SIGTERM, None)

    relay.start(lost)
    try:
        yield
    finally:
        service.close()
        relay.close()
    if found:
        raise found[0]


def follow(engine: Engine, relay: Relay) -> None:
    """Compute the passes of the first rank's Engine in another rank, until the first rank closes its relay.

    Raises LostRankError if a rank is lost, and the error that ended the engine.
    """
    with engine:
        for orders in relay.received():
            for ids, settings in orders:
                engine.submit(ids, **settings)  # nobody reads the answer here
            if engine.loop.error is not None:
                raise engine.loop.error
