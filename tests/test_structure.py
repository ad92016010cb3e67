"""The size of functions, and one name for one thing. What is exempt is printed with its reason: `pytest -s`."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from benchmarks.harness.results_folder import FOLDER
from benchmarks.structure import (
    FOLDERS,
    MOST_LINES,
    MOST_PARAMETERS,
    MOST_POSITIONAL,
    OURS_OF_MANY,
    THIS,
    TOPIC,
    WORSE_IF_MORE,
    circles,
    code_lines,
    count_package,
    functions,
    import_graph,
    is_given,
    known_columns,
    num_lines,
    of_functions,
    parameters,
    parsed,
    passed_files,
    repeated_lines,
    sources,
    worse,
)

ROOT = Path(__file__).parents[1]

EXEMPT = {  # function -> why its signature, or its length, is what it is
    "hf_accel/patching/patch.py::patch": "public",
    "hf_accel/checkpoints/load.py::load": "public",
    "hf_accel/estimate/estimate.py::estimate": "public",
    "hf_accel/verify/verify.py::verify": "public",
    "hf_accel/generation/hf/engine.py::Engine.submit": "public",
    "hf_accel/distill/losses/distillation_loss.py::distillation_loss": "public",
    "hf_accel/distill/trainer/callback.py::DistillationCallback.__init__": "public",
    "hf_accel/distill/teachers/teacher_cache.py::TeacherCache.build": "public",
    "hf_accel/distill/drafts/student.py::init_student": "public",
    "hf_accel/distill/drafts/draft.py::distill_draft": "public",
    "hf_accel/distill/drafts/measuring.py::measure_acceptance": "public",
    "hf_accel/attention/hf/mask.py::CausalMask.__new__": "the parts of a tensor",
    "tests/unit/fused/models.py::apply_rotary_pos_emb": "as transformers has it",
    "tests/unit/attention/test_flash.py::Standin.flash_attn_varlen_func": "as flash-attn has it",
    "tests/unit/attention/test_flash.py::Standin.flash_attn_with_kvcache": "as flash-attn has it",
    "tests/unit/attention/test_flash.py::Standin.varlen_attn": "as torch has it",
}

SAME_FILE_NAMES: dict[str, str] = {  # name -> why several files have it
    "__init__": "Python's own",
    "hf": "the seam of a room",
    "cpu": "a backend has one name in every room",
    "triton": "a backend has one name in every room",
    "attention": "a kernel has one name for every kind of device",
    "reference": "a backend has one name in every room",
    **dict.fromkeys(("estimate", "generate", "models", "plan", "verify"), "a command, and what it calls"),
    "awq": "a method, and a format of checkpoints that is named after it",
    "gptq": "a method, and a format of checkpoints that is named after it",
}


@cache
def crowded() -> dict[str, str]:
    """By function, what of it is too much, of all folders.

    A test takes its fixtures by name. What tests call may have many settings, of which each call names a few.
    """
    much_of: dict[str, str] = {}
    for folder, path in ((name, path) for name in FOLDERS for path in sources(ROOT, name, ".py")):
        where = path.relative_to(ROOT).as_posix()
        for name, function, is_method in functions(parsed(path)):
            total, positional = parameters(function, is_method)
            total = 0 if folder == "tests" else total
            positional = 0 if function.name.startswith("test_") else positional
            much = [(num_lines(function), MOST_LINES, "lines"), (total, MOST_PARAMETERS, "parameters")]
            much.append((positional, MOST_POSITIONAL, "positional parameters"))
            found = ", ".join(f"{number} {what}" for number, most, what in much if number > most)
            if found and not is_given(name, function):  # what has many parameters has many lines
                much_of[f"{where}::{name}"] = found
    return much_of


def test_functions_are_small() -> None:
    found = crowded()
    for name, reason in EXEMPT.items():
        print(f"exempt: {name}, {found.get(name)}: {reason}")
    assert {name: much for name, much in found.items() if name not in EXEMPT} == {}


def test_exemptions_are_needed() -> None:
    assert EXEMPT.keys() - crowded().keys() == set(), "take these from the list"


def test_functions_of_ours_that_take_much() -> None:
    """All of them are public: their keywords are listed in test_architecture.py."""
    package = [found for path in sources(ROOT, "hf_accel", ".py") for found in functions(parsed(path))]
    assert of_functions(package)[OURS_OF_MANY] <= 12


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("@triton.jit(do_not_specialize=X)\ndef f(): ...", True),
        ("@f.register_fake\ndef _(): ...", True),
        ("@torch.library.custom_op('a::b', mutates_args=())\ndef f(): ...", True),
        ("@common()\ndef bench(): ...", True),
        ("class QuantModule:\n    def _load_from_state_dict(self): ...", True),
        ("@checked_keywords()\ndef patch(): ...", False),
    ],
)
def test_signatures_that_are_given(source: str, given: bool) -> None:
    ((name, function, _),) = functions(ast.parse(source))
    assert is_given(name, function) is given


def same_names(kind: str) -> dict[str, list[str]]:
    """Names of files, or of classes at the top of one, that stand more than once in the package."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources(ROOT, "hf_accel", ".py"):
        where = path.relative_to(ROOT).as_posix()
        if kind == "file":
            places[path.stem].append(where)
        else:
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(where)
    return {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize(("kind", "known"), [("file", SAME_FILE_NAMES.keys()), ("class", set())])
def test_names_stand_once(kind: str, known: set[str]) -> None:
    found = same_names(kind)
    assert {name: places for name, places in found.items() if name not in known} == {}
    assert known - found.keys() <= {"hf"}, "take these from the list"


# -- the counts themselves -----------------------------------------------------------------------------------

SAMPLE = '''"""A docstring
of two lines."""

import os  # a comment

# another
def f(a, *, b=(
    1,
)):
    """Its own."""
    return """not
a docstring"""
'''


def test_lines_of_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SAMPLE)
    assert list(code_lines(tmp_path / "a.py")) == [4, 7, 8, 9, 11, 12]
    (tmp_path / "a.h").write_text("// a comment\nint a;  // and another\n/* two\nlines */ int b;\n\n")
    assert code_lines(tmp_path / "a.h") == {2: "int a;", 4: "int b;"}


def test_repeated_lines(tmp_path: Path) -> None:
    body = "".join(f"    x{number} = {number}\n" for number in range(6))
    (tmp_path / "a.py").write_text(f"def f():\n{body}    return x1\n")
    (tmp_path / "b.py").write_text(f"def g():\n{body}    return x2\n")
    assert repeated_lines(sorted(tmp_path.glob("*.py"))) == 12


def test_circles() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["e", "f"]]


def test_benchmarks_import_each_other_in_no_circle() -> None:
    assert circles(import_graph(ROOT, with_types=True, folder="benchmarks")) == []


@pytest.fixture(scope="module")
def passed() -> dict[str, list[str]]:
    return passed_files(ROOT)


def test_files_that_a_step_passes(passed: dict[str, list[str]]) -> None:
    assert set(passed["step"]) < set(passed["generate"]) and "patching/patch.py" in passed["patch"]
    assert set(passed["eager"]) <= set(passed["public"])


def test_the_tree_is_no_worse_than_the_table(passed: dict[str, list[str]]) -> None:
    """After a rise that a feature is worth, `python -m benchmarks.structure --accept` writes the line that says so."""
    counts = count_package(ROOT, passed)
    table = known_columns(FOLDER / f"{TOPIC}.json")[THIS]
    assert set(WORSE_IF_MORE) <= counts.keys() & table.keys()
    assert worse(counts, table) == {}, "improve it, or: python -m benchmarks.structure --accept 'COUNT=FEATURE'"


def test_what_counts_as_worse() -> None:
    before = dict.fromkeys(WORSE_IF_MORE, 100.0) | {"functions": 100.0, "rooms": 0.0, "import circles": None}
    counts = dict.fromkeys(WORSE_IF_MORE, 103.0) | {"functions": 900.0, "rooms": 1.0, "files of patch()": 104.0}
    assert worse(counts, before) == {"rooms": "0 became 1", "files of patch()": "100 became 104"}
