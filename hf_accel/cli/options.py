"""The options that several commands have: one table for the keywords of patch(), and what the user asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import BadInputError, told
from .output import Output

Path_ = Annotated[
    str, typer.Argument(metavar="PATH", help="A model's folder, a .gguf file, or a name on the Hugging Face hub.")
]
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
        """As a parameter of a command; None stands for what was not given."""
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
        values=("int8", "int4", "nf4", "auto", "none"),
    ),
    PatchOption("bits", "weights", NUMBER, "8, 4, 3 or 2 bits a weight, in the place of --weights.", "bits"),
    PatchOption("group_size", "weights", NUMBER, "Inputs that share a scale: 32, 64 or 128.", "group_size"),
    PatchOption("symmetric", "weights", SWITCH, "Without or with a zero point for each group.", "symmetric"),
    PatchOption(
        "activations", "weights", WORD, "Whether inputs are rounded too.", "activations", ("auto", "int8", "none")
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
    PatchOption("deterministic", "deterministic", SWITCH, "Tokens never depend on what runs beside them."),
)  # fmt: skip
KEYWORDS = tuple(dict.fromkeys(option.keyword for option in PATCH_OPTIONS))
WORDS: dict[str, Any] = {"none": None, "yes": True, "no": False}
WEIGHTS: dict[str | None, dict[str, Any]] = {  # the fields of a WeightConfig that a word stands for
    None: {}, "int8": {"bits": 8}, "int4": {"bits": 4}, "nf4": {"bits": 4, "format": "nf4"},
    "auto": {"bits": 8, "only_if_faster": True},
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What the user asked for, beside the command's own options.

    given: the options of PATCH_OPTIONS that were given, by name. output: where answers and progress go.
    """

    output: Output
    given: Mapping[str, Any] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """For patch(), plan() or load(). Reads the calibration data and loads a draft model, if there is one."""
        found: dict[str, Any] = {}
        for option in PATCH_OPTIONS:
            if option.name not in self.given:
                continue
            value = self.given[option.name]
            value = WORDS.get(value, value) if option.values else value
            if option.field is None:
                found[option.keyword] = value
            else:
                found.setdefault(f"{option.keyword}.", {})[option.field] = value
        return dict(_nested(found))

    @property
    def weights(self) -> Any:
        """As patch() and estimate() take them; None if none were asked for."""
        return self.keywords().get("weights")


def _nested(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keywords of patch(), with a dict where there are fields of a config."""
    for keyword in KEYWORDS:
        fields = found.get(f"{keyword}.")
        if keyword in found or fields:
            yield keyword, _value(keyword, found.get(keyword), fields or {}, given=keyword in found)


def _value(keyword: str, word: Any, fields: dict[str, Any], *, given: bool) -> Any:
    if keyword == "speculative" and given:
        word = _drafter(word)
    if not fields:
        return word
    if given and word is None:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in fields)
        raise BadInputError(f"{names} with --{keyword} none: there is nothing to set; leave one of them out")
    if keyword == "weights":
        if isinstance(fields.get("calibration"), Path):
            fields["calibration"] = texts_of(fields["calibration"])
        return WEIGHTS.get(word, {"bits": word}) | fields
    if keyword == "speculative":
        return {"drafter": word or "auto"} | fields
    return fields


def _drafter(word: str | None) -> Any:
    """A drafter's name as it is; a draft model, loaded, for its path."""
    if word in (None, "auto", "ngram", "suffix", "self-int4"):
        return word
    from .models import load_float

    return load_float(word or "")


def texts_of(path: Path) -> list[str]:
    """The texts of a file: one, or of .jsonl one a line."""
    import json

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}; name a text file") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is no text in UTF-8; name a text file") from error
    if path.suffix != ".jsonl":
        return [text]
    try:
        return [str(json.loads(line)["text"]) for line in text.splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{path} must hold one JSON object with a key 'text' a line: {error!r}; name a text file"
        ) from error


# -- commands ------------------------------------------------------------------------------------------


def common(*keywords: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Give a command --json, --debug and the options of these keywords of patch(); all of them for none.

    The function gets what was asked for as `asked`. Whatever it raises becomes one line and exit code 2.
    """
    options = [option for option in PATCH_OPTIONS if not keywords or option.keyword in keywords]
    switches = [
        _switch("json", "Print one JSON document on stdout, and nothing else there."),
        _switch("debug", "Show the traceback of an error."),
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            json, debug = values.pop("json"), values.pop("debug")
            given = {option.name: values.pop(option.name) for option in options}
            given = {name: value for name, value in given.items() if value not in (None, [])}
            with told(debug=debug), Output.opened(json=json, debug=debug) as output:
                function(**values, asked=Asked(output, given))

        own = inspect.signature(function, eval_str=True).parameters.values()
        kept = [one for one in own if one.name != "asked"]
        parameters = [*kept, *(option.parameter for option in options), *switches]
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _switch(name: str, help: str) -> inspect.Parameter:
    option = Annotated[bool, typer.Option(f"--{name}", help=help)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
