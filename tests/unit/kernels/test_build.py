"""What is compiled for a level."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_accel.kernels.cpu.build import (
    BASES,
    BY_TILES,
    LEVELS,
    OWN_SOURCES,
    SHARED,
    SOURCE,
    BuildError,
    _jobs,
    _precompile,
    find_compiler,
    own_sources,
)

OWN = r"\bHFA_(TILES|AMX|AVX_VNNI|I8MM)\b|\bdot4|\bDOT4_OFFSET\b|/tiles\.h"  # what levels and their bases differ in


def read_by(source: Path) -> dict[Path, str]:
    """The code of a source and of all that it includes, without comments."""
    found: dict[Path, str] = {}
    left = [source]
    while left:
        path = left.pop().resolve()
        if path not in found:
            found[path] = re.sub(r"//.*", "", path.read_text())
            left += [path.parent / name for name in re.findall(r'#include "(.+)"', found[path])]
    return found


@pytest.mark.parametrize("source", sorted((SOURCE / "kernels").glob("*.cpp")), ids=lambda source: source.stem)
def test_only_linear_kernels_differ_between_a_level_and_its_base(source: Path) -> None:
    code = {path: text for path, text in read_by(source).items() if path.parent.name != "simd"}
    differs = any(re.search(OWN, text) or "HFA_NAMESPACE::integer_experts(" in text for text in code.values())
    assert differs == (source.stem in {*OWN_SOURCES, *BY_TILES})


def test_a_level_has_the_kernels_of_its_base(tmp_path: Path) -> None:
    sources = {source.stem for source in (SOURCE / "kernels").glob("*.cpp")}
    jobs = _jobs({level: [] for level in LEVELS}, tmp_path)
    for level in LEVELS:
        own = [job for job in jobs if job.level == level]
        expected = {*own_sources(level)} if level in BASES else sources
        assert {job.source.stem for job in own} == expected
        assert all((f"-DHFA_BASE=hfa_{BASES.get(level)}" in job.flags) == (level in BASES) for job in own)
        sizes = [job.source.stat().st_size for job in own]
        assert sizes == sorted(sizes, reverse=True)
    alone = [job for job in _jobs({"amx": []}, tmp_path) if job.level != SHARED]
    assert {job.source.stem for job in alone} == sources and "HFA_BASE" not in str(alone), "its base is not compiled"


def test_what_kernels_include_is_precompiled_if_the_compiler_can(tmp_path: Path) -> None:
    try:
        compiler = [*find_compiler(), "-std=c++17"]
    except BuildError as error:
        pytest.skip(str(error))
    use = _precompile(compiler, ["-DHFA_NAMESPACE=hfa_portable"], tmp_path / "portable")
    if use:
        assert use == ["-include", str(tmp_path / "portable" / "common.h")]
        assert (tmp_path / "portable" / "common.h.gch").stat().st_size
    assert _precompile([*compiler, "-Dint64_t=?"], [], tmp_path / "refused") == []
