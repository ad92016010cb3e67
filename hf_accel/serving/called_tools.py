"""Calls of tools that an answer must consist of: tool_choice "required", or a tool by its name.

Models write calls in forms of their own, which they choose to write or not. A call that must come is written as JSON
for all of them, [{"name": ..., "parameters": {...}}, ...], by a grammar that leaves nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..generation.hf.grammars import JSON
from .api_errors import ApiError

# A tool that names no parameters gets these.
NO_PARAMETERS = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def calls_grammar(tools: Sequence[dict[str, Any]], name: str | None, *, several: bool) -> str:
    """Return the grammar of the calls. tools: those of a request. name: the tool to call once; None for any of them.

    several: whether there may be more than one call. Raises ApiError (400) if there is no such tool.
    """
    functions = [tool.get("function", tool) for tool in tools]
    chosen = [one for one in functions if name is None or one.get("name") == name]
    if not chosen:
        what = "names no tool; send tools" if name is None else f"names {name[:200]!r}, which is not among the tools"
        raise ApiError(400, f"tool_choice {what}", field="tool_choice")
    rules, calls = [], []
    for number, function in enumerate(chosen):
        given = function.get("parameters")
        parameters = NO_PARAMETERS if given is None else given
        if not isinstance(parameters, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, "a tool needs a name, and its parameters are a JSON schema", field="tools")
        head = f'{{"name": {json.dumps(function["name"])}, "parameters": '
        calls.append(f"{json.dumps(head)} p{number} {json.dumps('}')}")
        rules.append(f"p{number}: %json {json.dumps({**parameters, 'x-guidance': JSON})}")
    more = ' (", " call)*' if several and name is None else ""
    return "\n".join([f'start: "[" call{more} "]"', f"call: {' | '.join(calls)}", *rules])


def read_calls(text: str) -> list[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each call in an answer. Raises ValueError for half an answer."""
    return [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in json.loads(text)]
