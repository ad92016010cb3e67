"""The source of classes, which is inspect's own, though each file is parsed once for all of its classes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama

from hf_accel.recognition import source
from hf_accel.recognition.source import source_of


@dataclasses.dataclass(
    frozen=True,
)
class Decorated:
    """A class
    with a docstring that begins at the margin:
    class Local:
    """

    class Inner:
        number = 1


class Twice:
    number = 1


if sys.version_info > (99,):

    class Twice:  # type: ignore[no-redef]
        number = 2


def local() -> type:
    class Local:
        def forward(self) -> int:
            return 3

    return Local


@pytest.mark.parametrize("kind", [Decorated, Decorated.Inner, Twice, local()])
def test_classes_of_any_place(kind: type) -> None:
    assert source_of(kind) == inspect.getsource(kind)


@pytest.mark.parametrize("file", [modeling_llama, modeling_bert])
def test_a_file_is_parsed_once(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [each for each in vars(file).values() if isinstance(each, type) and each.__module__ == file.__name__][:5]
    expected, parsed, parse = [*map(inspect.getsource, kinds)], list[str](), ast.parse
    source_of.cache_clear()
    source.classes_in.cache_clear()
    monkeypatch.setattr(ast, "parse", lambda text: (parsed.append(text), parse(text))[1])
    assert [*map(source_of, kinds)] == expected and len(expected) == 5
    assert len(parsed) == 1


def test_a_file_that_was_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "written_again.py"
    for number in (1, 2):
        path.write_text("\n" * number + f"class Kind:\n    number = {number}\n")
        os.utime(path, (number, number))
        sys.modules.pop(path.stem, None)
        importlib.invalidate_caches()
        kind = importlib.import_module(path.stem).Kind
        assert source_of(kind) == f"class Kind:\n    number = {number}\n"
    sys.modules.pop(path.stem)


def test_classes_without_a_file() -> None:
    typed: dict[str, Any] = {"__name__": "nowhere"}
    exec("class Typed: ...", typed)
    assert source_of(typed["Typed"]) is None and source_of(int) is None
