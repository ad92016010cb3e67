"""The models of one run: made when a topic asks for them, and handed out only when verified."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_accel.cli.measurement import BASELINE
from hf_accel.hardware import detect, float_peak, read_bandwidth
from hf_accel.patching.twin import twin

from ..setups import SETUPS, Setup
from .checks import check, random_tokens
from .integer_peak import integer_peak
from .models import MODELS, from_checkpoint, load_model
from .settings import Settings


@dataclass(frozen=True)
class Entrant:
    """A setup with its model. prepare_seconds: what making it took; verified: how it was checked."""

    setup: Setup
    model: PreTrainedModel
    prepare_seconds: float
    verified: dict[str, Any]


class Bench:
    """refused: why setups do not take part, by name; verified: how the others were checked.

    keep_going: whether a setup that cannot be made, or computes something else, only stays out itself.
    """

    def __init__(self, settings: Settings, *, keep_going: bool = False) -> None:
        self.settings, self.keep_going = settings, keep_going
        self.refused: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._entrants: dict[str, Entrant] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        """Stock, as loaded; every other model is a twin of it or made from its weights."""
        settings = self.settings
        print(f"  making {settings.model} ...", flush=True)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        model = load_model(
            settings.model, layers=settings.layers, seed=settings.seed, dtype=dtype, device=settings.device
        )
        return from_checkpoint(model) if settings.device == "cpu" and settings.model in MODELS else model

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return read_bandwidth(detect(self.settings.device))

    def peak(self, kind: str) -> float | None:
        """Operations per second of torch's matrix product: "integer", or "float" in the model's dtype.

        Or in float32, if it is faster: torch may have no instructions for half precision. On a GPU, quantized weights
        are multiplied in the model's dtype.
        """
        device = self.settings.device
        if kind == "integer" and device == "cpu":
            return integer_peak(device)
        return max(float_peak(detect(device), dtype) for dtype in (self.model.dtype, torch.float32))

    @property
    def description(self) -> str:
        cut = f" cut to {self.settings.layers} layers" if self.settings.layers else ""
        return Path(self.settings.model).name + cut

    @property
    def setups(self) -> list[Setup]:
        """Stock, and those that were asked for and do not refuse."""
        wanted = [s for s in SETUPS if s.name == BASELINE or s.name in (self.settings.setups or (s.name,))]
        refused = {setup.name: reason for setup in wanted if (reason := self.refusal(setup))}
        self.refused = {**refused, **self._failed}
        return [setup for setup in wanted if setup.name not in self.refused]

    def refusal(self, setup: Setup) -> str | None:
        if setup.is_peer and self.settings.quick and not self.settings.setups:
            return "a quick run leaves other libraries out"
        if setup.only_named and setup.name not in self.settings.setups:
            return setup.only_named
        return setup.refuses(self.model.config)

    @property
    def entrants(self) -> dict[str, Entrant]:
        tried = {setup.name: self._tried(setup) for setup in self.setups}
        return {name: entrant for name, entrant in tried.items() if entrant is not None}

    def _tried(self, setup: Setup) -> Entrant | None:
        try:
            return self.entrant(setup)
        except Exception as error:
            if not self.keep_going or setup.name == BASELINE:
                raise
            traceback.print_exc()
            self.refused[setup.name] = self._failed[setup.name] = f"{type(error).__name__}: {error}"
            return None

    @property
    def verified(self) -> list[dict[str, Any]]:
        return [entrant.verified for entrant in self._entrants.values()]

    def entrant(self, setup: Setup) -> Entrant:
        if setup.name not in self._entrants:
            model = twin(self.model)
            print(f"  preparing and verifying {setup.name} ...", end=" ", flush=True)
            start = time.perf_counter()
            model = setup.prepare(model)
            seconds = time.perf_counter() - start
            verified = check(setup.name, model, self.model, tolerance=setup.tolerance, exact=setup.exact)
            self._entrants[setup.name] = Entrant(setup, model, seconds, verified)
            print(f"{time.perf_counter() - start:.1f} s", flush=True)
        return self._entrants[setup.name]

    def tokens(self, *, batch: int, length: int) -> Tensor:
        return random_tokens(self.model, batch=batch, length=length, seed=self.settings.seed)

    def filled_cache(self, entrant: Entrant, *, batch: int, tokens: int) -> Any:
        """Of random keys and values, with room for the steps that are timed."""
        room, seed = self.settings.batch_tokens + 1, self.settings.seed
        return entrant.setup.filled_cache(entrant.model, batch=batch, tokens=tokens, room=room, seed=seed)
