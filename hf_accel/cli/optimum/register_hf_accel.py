"""optimum's own command line finds `hf-accel` here: `optimum-cli hf-accel quantize`, `plan`, `serve` and the others.

setup.py installs this file as optimum.commands.register.register_hf_accel, where optimum looks for the commands of
other packages; it imports every Python file of this folder each time that optimum-cli starts. So this folder is no
package of hf_accel, holds no other Python file, and imports hf_accel only where a command runs.
"""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

NO_PREFIX = "\0"  # no word begins with it


class HfAccelCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """Hands everything after `optimum-cli hf-accel` to the app of `hf-accel`, which knows the commands and options."""

    COMMAND = CommandInfo(
        name="hf-accel",
        help="Plan, quantize, serve and measure transformers models with native kernels (hf_accel).",
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.prefix_chars = NO_PREFIX  # argparse would take options before the first command, as --help
        parser.add_argument("words", nargs=REMAINDER)

    def run(self) -> None:
        from hf_accel.cli.app import app

        app(self.args.words, prog_name="optimum-cli hf-accel")


REGISTER_COMMANDS = [HfAccelCommand]
