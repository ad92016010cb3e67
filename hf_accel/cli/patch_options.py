"""The keywords of patch() as options of commands: one table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

CALIBRATION_HELP = "Text that the model will work on, some 10,000 tokens: a text file, or .jsonl with a key 'text'."


@dataclass(frozen=True)
class PatchOption:
    """One keyword of patch(), or one field of a config that a keyword takes.

    keyword: of patch(), which is also the panel of --help. field: of WeightConfig, CacheConfig or SpeculativeConfig;
    None: the keyword itself. values: all that there are, where they are few words.
    """

    name: str
    keyword: str
    type: Any
    help: str
    field: str | None = None
    values: tuple[str, ...] = ()

    @property
    def parameter(self) -> inspect.Parameter:
        """Return it as a parameter of a command; its value is None if it was not given."""
        more: dict[str, Any] = {"metavar": "|".join(self.values)} if self.values else {}
        option = typer.Option(
            help=self.help,
            rich_help_panel="What patch() does",
            show_default=False,
            autocompletion=self.complete,
            **more,
        )
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[self.type, option]
        )

    @property
    def complete(self) -> Callable[[str], list[str]] | None:
        if not self.values:
            return None
        return lambda incomplete: [value for value in self.values if value.startswith(incomplete)]


WORD, NUMBER, SWITCH = str | None, int | None, bool | None
PATCH_OPTIONS = (
    PatchOption(
        "weights", "weights", WORD, "How weights are stored (default: int8).",
        values=("int8", "int4", "fp8", "nf4", "auto", "none"),
    ),
    PatchOption("bits", "weights", NUMBER, "8, 4, 3 or 2 bits a weight, instead of --weights.", "bits"),
    PatchOption("group_size", "weights", NUMBER, "Inputs that share a scale: 32, 64 or 128.", "group_size"),
    PatchOption("symmetric", "weights", SWITCH, "Without or with a zero point for each group.", "symmetric"),
    PatchOption(
        "activations", "weights", WORD, "Whether inputs are rounded too.", "activations",
        ("auto", "int8", "fp8", "none"),
    ),
    PatchOption(
        "method", "weights", WORD, "Round to nearest, or by calibration, which loses less.", "method",
        ("rtn", "gptq", "awq"),
    ),
    PatchOption("calibration", "weights", Path | None, CALIBRATION_HELP, "calibration"),
    PatchOption("resume", "weights", Path | None, "A folder for finished layers, to go on after a stop.", "resume"),
    PatchOption(
        "average_bits", "weights", float | None, "As 4.5: 8 bits for the layers that 4 hurt most.", "average_bits"
    ),
    PatchOption("skip", "weights", list[str] | None, "A Linear that stays as it is; may be repeated.", "skip"),
    PatchOption("head", "weights", WORD, "The output head.", "head", ("int8", "none")),
    PatchOption("attention", "attention", WORD, "A backend's name, auto, or none for stock.", values=(
        "auto", "cpu", "triton", "flash_attn", "varlen", "sdpa", "reference", "none",
    )),
    PatchOption("cache", "cache", WORD, "The cache of keys and values.", values=("paged", "none")),
    PatchOption(
        "cache_dtype", "cache", WORD, "How keys and values are stored.", "dtype", ("auto", "int8", "fp8", "int4")
    ),
    PatchOption("block_size", "cache", NUMBER, "Tokens in a block.", "block_size"),
    PatchOption("max_tokens", "cache", NUMBER, "Tokens that fit into the cache, of all sequences.", "max_tokens"),
    PatchOption("prefix_sharing", "cache", SWITCH, "Keep one copy of what prompts begin with.", "prefix_sharing"),
    PatchOption("fuse", "fuse", SWITCH, "Several steps of a layer in one native call."),
    PatchOption(
        "speculative", "speculative", WORD, "What drafts tokens: ngram, suffix, self-int4, auto, or a draft's PATH."
    ),
    PatchOption("num_draft", "speculative", NUMBER, "Tokens that are drafted at a time.", "num_draft"),
    PatchOption(
        "keep_original", "keep_original", WORD, "The weights that are replaced.", values=("auto", "yes", "no")
    ),
    PatchOption("deterministic", "deterministic", SWITCH, "Tokens never depend on other requests in the batch."),
)  # fmt: skip
