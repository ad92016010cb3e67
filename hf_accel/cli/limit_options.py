"""The options of a server's limits, made of the fields of Limits: their types, defaults and least values."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from hf_accel.serving.limits import Limits, least_of

OPTIONS = {  # field of Limits -> the option, if it has another name, and its help
    "max_running": (None, "Choices computed at a time."),
    "max_queue": (None, "Choices that may wait; more get 429."),
    "max_prompt_tokens": (None, "Most tokens of a prompt."),
    "max_new_tokens": (None, "Most tokens of a choice."),
    "max_body_bytes": (None, "Bytes of a request at most."),
    "image_hosts": (
        "allow_image_host", "A host to fetch images of messages from; may be repeated; '*' is any."
    ),
    "adapter_folder": (None, "Clients may load the adapters in this folder, and unload any."),
    "ignore_unknown_fields": (None, "Leave fields of requests out that are not known here."),
}  # fmt: skip

PANEL: dict[str, Any] = {"rich_help_panel": "Limits"}


def limit_parameters() -> list[inspect.Parameter]:
    """Return the options as parameters of a command."""
    hints, found = get_type_hints(Limits), []
    for one in (one for one in fields(Limits) if one.name in OPTIONS):
        name, help = OPTIONS[one.name]
        kind, default, more = hints[one.name], one.default, PANEL
        if kind == tuple[str, ...]:
            kind, default = list[str] | None, None
        elif kind in (int, int | None):
            more = {**PANEL, "min": least_of(one.name)}
        switch = (f"--{one.name.replace('_', '-')}",) if kind is bool else ()
        annotation: Any = Annotated[kind, typer.Option(*switch, help=help, **more)]
        found.append(
            inspect.Parameter(name or one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    return found


def limits_of(values: Mapping[str, Any]) -> Limits:
    """Return the limits of the values of these options, by name."""
    given = {field: values[name or field] for field, (name, _) in OPTIONS.items()}
    return Limits(**given | {"image_hosts": tuple(given["image_hosts"] or ())})
