"""hf-accel serve: its options and its server are hf_accel's, which are imported when it is called."""

from __future__ import annotations

from importlib import import_module

import typer

from .failures import BadInputError, told
from .output import hush

NEEDS = 'the server needs packages that are not installed; run: pip install "hf_accel[serve]"'
# Its own --help and all options go on to the function that is imported.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context) -> None:
    """Serve a model with transformers' OpenAI-compatible server, patched.

    \b
    Examples:
      hf-accel serve examples/stdlib-tiny
      hf-accel serve Qwen/Qwen3-0.6B --weights int8 --port 8000
      hf-accel serve --help
    """
    debug = "--debug" in context.args
    with told(debug=debug):
        if not debug:
            hush()
        try:
            function = import_module("hf_accel.cli.serve").serve
        except ImportError as error:
            raise BadInputError(f"{NEEDS} ({error})") from error
    inner = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    inner.command()(function)
    typer.main.get_command(inner).main(context.args, context.command_path, standalone_mode=False)
