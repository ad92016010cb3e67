"""The options that several commands have: one table for the keywords of patch(), and what the user asked for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from hf_accel.config import DRAFTERS, WEIGHTS, CacheConfig, SpeculativeConfig, WeightConfig
from hf_accel.config.patch_config import PatchKeywords
from hf_accel.config.weight_config import NAMED_DATA, WITHDRAWN_DATA

from .models import DTYPE_NAMES, load_float
from .output import BadInputError, Output, one_line_errors
from .token_options import TokenChoice, token_parameters

Path_ = Annotated[
    str, typer.Argument(metavar="PATH", help="A model's folder, a .gguf file, or a name on the Hugging Face hub.")
]
WORDS: dict[str, Any] = {"none": None, "yes": True, "no": False}
TYPES = {None: PatchKeywords, "weights": WeightConfig, "cache": CacheConfig, "speculative": SpeculativeConfig}
CHOICE: Any = "one of the words that its own type names"
NUMBER, SWITCH = int | None, bool | None
CALIBRATION_HELP = (
    "Text that the model will work on, some 10,000 tokens: a text file, or .jsonl with a key 'text'; or what optimum "
    f"downloads: {', '.join(NAMED_DATA)}."
)


@dataclass(frozen=True)
class PatchOption:
    """One keyword of patch(), or one field of a config that a keyword takes.

    keyword: of patch(). field: of WeightConfig, CacheConfig or SpeculativeConfig; None: the keyword itself. type:
    CHOICE is one of the words that the keyword's or the field's own type names.
    """

    name: str
    keyword: str
    type: Any
    help: str
    field: str | None = None

    @property
    def values(self) -> tuple[str, ...]:
        """The words to choose from; none if another value may be given."""
        if self.type is not CHOICE:
            return ()
        owner = TYPES[self.keyword if self.field else None]
        return tuple(_words(get_type_hints(owner)[self.field or self.keyword]))

    @property
    def parameter(self) -> inspect.Parameter:
        """Return it as a parameter of a command; its value is None if it was not given."""
        kind = str | None if self.type is CHOICE else self.type
        more = choice(self.help, self.values)
        option = typer.Option(rich_help_panel="What patch() does", show_default=False, **more)
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
        )


def _words(hint: Any) -> Iterator[str]:
    """Iterate over the words for the values of a type: auto, yes, no and none for Literal["auto"] | bool | None."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif hint is bool:
        yield from ("yes", "no")
    elif hint is type(None):
        yield "none"
    for part in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _words(part)


def choice(help: str, values: Sequence[str]) -> dict[str, Any]:
    """Return the keywords of typer.Option() whose help names the values to choose from; a shell completes them."""
    if not values:
        return {"help": help}

    def complete(incomplete: str) -> list[str]:
        return [one for one in values if one.startswith(incomplete)]

    return {"help": f"{help}: {', '.join(values)}.", "metavar": "<word>", "autocompletion": complete}


Dtype = Annotated[str, typer.Option(**choice("The dtype of weights in floating point", DTYPE_NAMES))]
Fit = Annotated[
    str | None,
    typer.Option(
        help="A memory, as 6GB, for which bits, cache and tokens are chosen, except for what other options say.",
        rich_help_panel="What patch() does",
    ),
]
PATCH_OPTIONS = (
    PatchOption("weights", "weights", CHOICE, "How weights are stored (int8 if left out)"),
    PatchOption("bits", "weights", NUMBER, "8, 4, 3 or 2 bits for each weight, instead of --weights.", "bits"),
    PatchOption("group_size", "weights", NUMBER, "Inputs that share a scale: 32, 64 or 128.", "group_size"),
    PatchOption("symmetric", "weights", SWITCH, "Leave out the zero point of each group, or store it.", "symmetric"),
    PatchOption("activations", "weights", CHOICE, "How the inputs of a layer are rounded", "activations"),
    PatchOption("method", "weights", CHOICE, "Round to nearest, or by calibration, which loses less", "method"),
    PatchOption("calibration", "weights", Path | None, CALIBRATION_HELP, "calibration"),
    PatchOption("resume", "weights", Path | None, "A folder for finished layers, to go on after a stop.", "resume"),
    PatchOption(
        "average_bits", "weights", float | None, "Such as 4.5: 8 bits for the layers that 4 hurt most.", "average_bits"
    ),
    PatchOption("skip", "weights", list[str] | None, "A Linear that stays as it is; may be repeated.", "skip"),
    PatchOption("head", "weights", CHOICE, "How the output head is stored", "head"),
    PatchOption("embedding", "weights", CHOICE, "How the input embedding is stored", "embedding"),
    PatchOption("attention", "attention", CHOICE, "What computes attention (none: as stock)"),
    PatchOption("cache", "cache", CHOICE, "The cache of keys and values"),
    PatchOption("cache_dtype", "cache", CHOICE, "How keys and values are stored", "dtype"),
    PatchOption("block_size", "cache", NUMBER, "Tokens in a block.", "block_size"),
    PatchOption("max_tokens", "cache", NUMBER, "Tokens of all sequences that fit into the cache.", "max_tokens"),
    PatchOption("prefix_sharing", "cache", SWITCH, "Keep one copy of what prompts begin with.", "prefix_sharing"),
    PatchOption("fuse", "fuse", SWITCH, "Compute several steps of a layer in one native call."),
    PatchOption(
        "speculative", "speculative", str | None, f"What drafts tokens: {', '.join(DRAFTERS)}, or a draft's PATH."
    ),
    PatchOption("num_draft", "speculative", NUMBER, "Tokens that are drafted at a time.", "num_draft"),
    PatchOption("keep_original", "keep_original", CHOICE, "Whether replaced weights stay in memory"),
    PatchOption("deterministic", "deterministic", SWITCH, "Tokens never depend on other requests of the batch."),
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """The options that several commands share, as the user gave them.

    given: the options of PATCH_OPTIONS that were given, by name. tokens: how tokens are chosen, for what writes text.
    output: where answers and progress go. others: the values of the options that one command alone has from a table.
    """

    output: Output
    given: Mapping[str, Any] = field(default_factory=dict)
    tokens: TokenChoice = field(default_factory=TokenChoice)
    others: Mapping[str, Any] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """Return keywords of patch(), plan() or load().

        Reads the calibration data and loads a draft model, if there is one.
        """
        found: dict[str, Any] = {}
        for option in PATCH_OPTIONS:
            if option.name not in self.given:
                continue
            value = self.given[option.name]
            if option.values and value not in option.values:
                raise BadInputError(
                    f"--{option.name.replace('_', '-')} {value} is not known; choose one of {', '.join(option.values)}"
                )
            value = WORDS.get(value, value) if option.values else value
            if option.field is None:
                found[option.keyword] = value
            else:
                found.setdefault(f"{option.keyword}.", {})[option.field] = value
        return dict(_nested(found))


def with_fit(keywords: dict[str, Any], fit: str | None) -> dict[str, Any]:
    """Return keywords of patch() as plan() and load() take them, with what --fit says."""
    return keywords if fit is None else {**keywords, "fit": int(fit) if fit.isdigit() else fit}


def _nested(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return keywords of patch(), with a dict for the fields of a config."""
    for keyword in dict.fromkeys(option.keyword for option in PATCH_OPTIONS):
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
        if given and "bits" in fields:
            raise BadInputError(f"--weights {word} and --bits {fields['bits']} are both given; leave one of them out")
        if isinstance(fields.get("calibration"), Path):
            fields["calibration"] = _calibration(fields["calibration"])
        return WEIGHTS.get(word, {} if word is None else {"bits": word}) | fields
    if keyword == "speculative":
        return {"drafter": word or "auto"} | fields
    return fields


def _calibration(path: Path) -> Any:
    """Return the texts of a file, or the name of data that optimum knows unless a file is called so."""
    named = str(path) in (*NAMED_DATA, *WITHDRAWN_DATA) and not path.exists()
    return str(path) if named else texts_in_file(path)


def _drafter(word: str | None) -> Any:
    """Return a drafter's name and the folder of a head unchanged; load a draft model from its path."""
    if word is None or word in DRAFTERS:
        return word
    from hf_accel.distill.drafts.heads import holds_head

    return word if holds_head(word) else load_float(word)


def texts_in_file(path: Path) -> list[str]:
    """Read the texts of a file: one text, or one per line of a .jsonl file."""
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


def common(
    *keywords: str, writes: bool = False, others: Sequence[inspect.Parameter] = ()
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Give a command --json, --debug and the options of these keywords of patch(); all of them for none.

    writes: whether it writes text, and takes the options of how tokens are chosen. others: options of a table of its
    own, whose values are `asked.others`.
    The function gets what was asked for as `asked`. Whatever it raises becomes one line and exit code 2.
    """
    options = [option for option in PATCH_OPTIONS if not keywords or option.keyword in keywords]
    switches = [
        _switch("json", "Print one JSON document on stdout, and nothing else there."),
        _switch("debug", "Show the traceback of an error."),
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        kept = [one for one in own if one.name != "asked"]
        chosen = token_parameters() if writes else []
        parameters = [*kept, *others, *chosen, *(option.parameter for option in options), *switches]
        names = [one.name for one in parameters]

        @wraps(function)
        def command(**values: Any) -> None:
            json, debug = values.pop("json"), values.pop("debug")
            given = {option.name: values.pop(option.name) for option in options}
            tokens = TokenChoice.of({one.name: values.pop(one.name) for one in chosen})
            own_table = {one.name: values.pop(one.name) for one in others}
            given = {name: value for name, value in given.items() if value not in (None, [])}
            with one_line_errors(names, debug=debug), Output.opened(json=json, debug=debug) as output:
                function(**values, asked=Asked(output, given, tokens, own_table))

        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _switch(name: str, help: str) -> inspect.Parameter:
    option = Annotated[bool, typer.Option(f"--{name}", help=help)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
