"""The commands, and the error of a command that was not understood."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .bench import bench
from .chat import chat
from .embed import embed
from .estimate import estimate
from .generate import generate
from .output import BAD_INPUT, INTERRUPTED, say, usage_line
from .plan import plan
from .quantize import quantize
from .serve import serve
from .verify import verify

PROGRAM = "hf-accel"


class Commands(TyperGroup):
    """Commands that end with one line on stderr where typer would draw a box."""

    def main(self, *args: Any, **settings: Any) -> Any:
        given = args[0] if args else settings.get("args")
        program = settings.get("prog_name") or PROGRAM  # None where the console script calls it
        try:
            code = super().main(given, program, standalone_mode=False)
        except typer.Abort:
            say("interrupted; nothing half-written is left")
            code = INTERRUPTED
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's class for them has moved between releases
                raise
            say(usage_line(error))
            code = BAD_INPUT
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name=PROGRAM, cls=Commands, invoke_without_command=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)  # fmt: skip
for command in (plan, estimate, quantize, generate, chat, embed, verify, bench, serve):
    app.command()(command)


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Make a transformers model smaller and faster, from the command line.

    \b
    Examples:
      hf-accel plan examples/stdlib-tiny
      hf-accel generate examples/stdlib-tiny --prompt "import re"
      hf-accel quantize examples/stdlib-tiny tiny-int4 --weights int4
      hf-accel COMMAND --help
    """
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("hf_accel"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
