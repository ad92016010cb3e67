"""Compiles the CPU kernels while hf_accel is built or installed; all else about the package is in pyproject.toml.

Without a compiler the installation succeeds all the same, and leaves the reason where the plan finds it.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from types import ModuleType

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent
KERNELS = Path("hf_accel", "kernels", "cpu")
# The folder of optimum that it reads other packages' commands from, and where the file for it lies here. Both of
# optimum's folders are namespaces: what is installed there stands next to its own files and replaces none.
OPTIMUM = {"optimum.commands.register": "hf_accel/cli/optimum"}


class BuildKernels(Command):
    """The library goes into the wheel, or, for an editable install, beside its sources."""

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        kernels = build_module()
        folder = (ROOT if self.editable_mode else Path(self.build_lib or "build/lib")) / KERNELS
        if not self.editable_mode:  # what an earlier build left is not of these sources
            for left in (*kernels.LIBRARIES.values(), kernels.REASON):
                (folder / left).unlink(missing_ok=True)
        kernels.build_or_note(folder)

    def get_source_files(self) -> list[str]:
        """Those of a source distribution: package-data lists them already."""
        return []

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def build_module() -> ModuleType:
    """build.py by its path: hf_accel needs torch, which an isolated build does not have."""
    spec = importlib.util.spec_from_file_location("build_kernels", ROOT / KERNELS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PlatformWheel(bdist_wheel):
    """One wheel for every Python of a platform: the library knows neither Python nor torch.

    On macOS, Python may be for both kinds of processor, but the library is for this one."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2].replace("universal2", platform.machine())


class PlatformDistribution(Distribution):
    """It has binary code, though none that Python imports."""

    def has_ext_modules(self) -> bool:
        return True


build.sub_commands = [*build.sub_commands, ("build_kernels", None)]
setup(
    packages=[*find_packages(include=["hf_accel", "hf_accel.*"]), *OPTIMUM],
    package_dir=OPTIMUM,
    distclass=PlatformDistribution,
    cmdclass={"build_kernels": BuildKernels, "bdist_wheel": PlatformWheel},
)
