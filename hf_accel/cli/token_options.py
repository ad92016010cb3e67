"""The options of how tokens are chosen, and what they mean for generate() and for an Engine."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated, Any

import typer

OPTIONS: tuple[tuple[str, Any, str, dict[str, float]], ...] = (
    ("temperature", float, "0: always the likeliest token.", {"min": 0}),
    ("top_p", float, "Sample among the likeliest of this sum.", {"min": 0, "max": 1}),
    ("top_k", int, "Sample among this many of the likeliest; 0: all.", {"min": 0}),
    ("min_p", float, "Least share of the likeliest's chance.", {"min": 0, "max": 1}),
    ("repetition_penalty", float, "Above 1: repeats less.", {"min": 1e-3}),
    ("presence_penalty", float, "Above 0: what was written comes less often.", {"min": -2, "max": 2}),
    ("frequency_penalty", float, "The same, for each time that it was written.", {"min": -2, "max": 2}),
    ("min_tokens", int, "The least tokens to write.", {"min": 0}),
    ("seed", int, "The same seed gives the same text.", {}),
    ("stop", list[str], "Text to stop at; may be repeated.", {}),
)


def token_parameters() -> list[inspect.Parameter]:
    """Return the options as parameters of a command; the value of one that was not given is None."""
    panel: dict[str, Any] = {"rich_help_panel": "How tokens are chosen", "show_default": False}
    found = []
    for name, kind, help, bounds in OPTIONS:
        more: dict[str, Any] = {**panel, **bounds}
        annotation: Any = Annotated[kind | None, typer.Option(help=help, **more)]
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


@dataclass(frozen=True)
class TokenChoice:
    """The options that a user gave. given: the settings of generate() and of an Engine, None for those left out."""

    given: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    stop: list[str] | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> TokenChoice:
        """Make them of the values of a command's options, by name."""
        given = dict(values)
        seed, stop = given.pop("seed", None), given.pop("stop", None)
        return cls({"min_new_tokens": given.pop("min_tokens", None), **given}, seed, stop or None)


def asked_for(config: Any, given: Mapping[str, Any], *, seed: int | None) -> dict[str, Any]:
    """Return the settings that were given, as the server reads a request: None was left out.

    If the model's own settings are greedy, one that needs sampling switches it on, at temperature 1.
    """
    found = {name: value for name, value in given.items() if value is not None}
    asks_for_samples = seed is not None or not found.keys().isdisjoint({"top_p", "top_k", "min_p"})
    if "temperature" not in found and not config.do_sample and asks_for_samples:
        found["temperature"] = 1.0
    return found


def sampling_of(config: Any, given: Mapping[str, Any], *, seed: int | None, num_prompt: int = 0) -> dict[str, Any]:
    """Return keywords of generate(). given: options by name. num_prompt: tokens of its rows that are not new."""
    found = asked_for(config, given, seed=seed)
    processors = _penalties(found, num_prompt)
    if found.get("temperature") == 0:
        kept = ("repetition_penalty", "min_new_tokens")
        return {"do_sample": False} | {name: found[name] for name in kept if name in found} | processors
    return found | ({"do_sample": True} if "temperature" in found else {}) | processors


def _penalties(found: dict[str, Any], num_prompt: int) -> dict[str, Any]:
    """Take out the penalties that generate() does not have, and return the processor that adds them."""
    presence, frequency = (found.pop(f"{name}_penalty", 0.0) for name in ("presence", "frequency"))
    if not presence and not frequency:
        return {}
    from transformers import LogitsProcessor, LogitsProcessorList

    from hf_accel.generation.sampling.processors import FrequencyPenalty

    penalty = FrequencyPenalty(frequency, presence)

    class Penalties(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            prefixes: Any = [SimpleNamespace(ids=row, num_prompt=num_prompt) for row in input_ids.cpu()]
            return penalty(scores, prefixes)

    return {"logits_processor": LogitsProcessorList([Penalties()])}
