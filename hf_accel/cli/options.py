"""The options that several commands have: one table for the keywords of patch(), and what the user asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import BadInputError, one_line_errors
from .output import Output
from .patch_options import PATCH_OPTIONS

Path_ = Annotated[
    str, typer.Argument(metavar="PATH", help="A model's folder, a .gguf file, or a name on the Hugging Face hub.")
]
KEYWORDS = tuple(dict.fromkeys(option.keyword for option in PATCH_OPTIONS))
WORDS: dict[str, Any] = {"none": None, "yes": True, "no": False}


@dataclass(frozen=True)
class Asked:
    """The options that several commands share, as the user gave them.

    given: the options of PATCH_OPTIONS that were given, by name. output: where answers and progress go.
    """

    output: Output
    given: Mapping[str, Any] = field(default_factory=dict)

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

    @property
    def weights(self) -> Any:
        """Return weights= of patch() and estimate(); None if none were asked for."""
        return self.keywords().get("weights")


def _nested(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return keywords of patch(), with a dict for the fields of a config."""
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
        if given and "bits" in fields:
            raise BadInputError(f"--weights {word} and --bits {fields['bits']} are both given; leave one of them out")
        if isinstance(fields.get("calibration"), Path):
            fields["calibration"] = texts_in_file(fields["calibration"])
        from hf_accel.config import WEIGHTS  # which imports torch

        return WEIGHTS.get(word, {} if word is None else {"bits": word}) | fields
    if keyword == "speculative":
        return {"drafter": word or "auto"} | fields
    return fields


def _drafter(word: str | None) -> Any:
    """Return a drafter's name unchanged; load a draft model from its path."""
    if word in (None, "auto", "ngram", "suffix", "self-int4"):
        return word
    from .models import load_float

    return load_float(word or "")


def texts_in_file(path: Path) -> list[str]:
    """Read the texts of a file: one text, or one per line of a .jsonl file."""
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
            with one_line_errors(debug=debug), Output.opened(json=json, debug=debug) as output:
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
