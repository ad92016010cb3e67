"""The words of the package: how docstrings open, words that are not plain English, and names that mean one thing."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.structure import parsed, sources

ROOT = Path(__file__).parents[1]

# A docstring is a sentence with subject and verb. One that opens with these is half of one: "What the pass reads."
OPENINGS = {"As", "How", "Of", "That", "Those", "What", "Where", "Whether", "Which", "Why"}

# Not plain English, or plain words in a meaning of our own, and what to write instead.
DIALECT = {
    "afresh": "again",
    "albeit": "although",
    "alike": "in the same way",
    "amid": "between",
    "anew": "again",
    "aught": "anything",
    "beside": "besides, next to, or as well as",
    "betwixt": "between",
    "forsake": "give up",
    "heed": "obey, or follow",
    "heeded": "followed",
    "heeds": "obeys, or follows",
    "henceforth": "from now on",
    "hereby": "so",
    "herein": "in this",
    "hitherto": "so far",
    "law": "distribution",
    "laws": "distributions",
    "lest": "so that ... not",
    "lowered": "say what was made lower",
    "loose": "say what it does not belong to",
    "naught": "nothing, or zero",
    "nigh": "near",
    "oft": "often",
    "oriented": "say along which axis",
    "oughtn": "must not",
    "thereby": "so",
    "therein": "in it",
    "thereof": "of it",
    "told": "given, or say which facts",
    "turned": "rotated, or transposed",
    "unsaid": "not given",
    "unto": "to",
    "thence": "from there",
    "whence": "from where",
    "whereby": "by which",
    "wherein": "in which",
    "whereof": "of which",
    "whilst": "while",
}
# The same, of several words; in docstrings and comments.
PHRASES = {
    "at hand": "here, or available",
    "but for": "except for",
    "for it says": "say which",
    "goes by": "follows, or depends on",
    "has it": "as in ...",
    "in the place of": "instead of",
    "says so": "say what it says",
}


def test_the_lists_are_long_enough() -> None:
    assert len(DIALECT) >= 30


# -- docstrings ----------------------------------------------------------------------------------------------


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


def documented(path: Path) -> Iterator[tuple[int, str]]:
    """(line, docstring) of the module, and of its classes and functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def files() -> list[Path]:
    return sources(ROOT, "hf_accel", ".py")


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


def opening(text: str) -> str:
    return (re.match(r"\w*", text) or [""])[0]


def test_docstrings_are_sentences() -> None:
    found = [
        f"{place(path, line)}: {text.splitlines()[0]}"
        for path in files()
        for line, text in documented(path)
        if opening(text) in OPENINGS
    ]
    assert found == []


@pytest.mark.parametrize("text", ["What it reads.", "Of each, where many run.", "As torch's.", "Whether it is."])
def test_openings_that_are_refused(text: str) -> None:
    assert opening(text) in OPENINGS


# -- words ---------------------------------------------------------------------------------------------------

WORD = re.compile(rf"\b({'|'.join([*DIALECT, *PHRASES])})\b", re.IGNORECASE)


def dialect_of(text: str) -> list[str]:
    return [found.lower() for found in WORD.findall(" ".join(text.split()))]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def native_comments(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"/\*.*?\*/|//[^\n]*", text, flags=re.DOTALL):
        yield text.count("\n", 0, found.start()) + 1, found.group()


def names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, words) of each function, class, parameter and variable that the file defines."""
    for node in nodes_of(path):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, spaced(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, spaced(name)


def spaced(name: str) -> str:
    """The words of a name, of the form two_words or TwoWords."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ")


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings that a file holds and that are no docstring: among them its messages."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def test_words_are_plain_english() -> None:
    found = []
    for path in files():
        for line, text in [*documented(path), *comments(path), *names(path), *messages(path)]:
            found += [f"{place(path, line)}: {word!r}" for word in dialect_of(text)]
    for path in sources(ROOT, "hf_accel", ".cpp", ".h"):
        for line, text in native_comments(path):
            found += [f"{place(path, line)}: {word!r}" for word in dialect_of(text)]
    known = DIALECT | PHRASES
    assert sorted({f"{entry} -> {known[entry.rpartition(': ')[2].strip(chr(39))]}" for entry in found}) == []


def test_dialect_is_found_in_sentences_and_names() -> None:
    assert dialect_of("The rows, but\nfor the last, as they were told.") == ["but for", "told"]
    assert dialect_of(spaced("heeds_end")) == ["heeds"] and dialect_of(spaced("LooseEnd")) == ["loose"]
    assert dialect_of("lawful tolds") == []


# -- names -----------------------------------------------------------------------------------------------------

DEVICES = "one operation has one name in the interface and on each kind of device"
SAME_FUNCTION_NAMES = {  # public functions of several modules -> why they have one name
    **dict.fromkeys(("add_rms_norm", "gate_and_multiply", "gated", "rms_norm", "rope", "rope_and_write"), DEVICES),
    **dict.fromkeys(("attend", "launches", "multiply", "rotate", "topk", "write_pages"), DEVICES),
    **dict.fromkeys(("block_size", "by_output"), "asked of the weights of each backend or format"),
    **dict.fromkeys(("estimate", "plan", "verify"), "a command, and what it calls"),
    "main": "of a program",
    "quantize": "every method, format and kernel quantizes",
    "readable": "of a weight in each form",
    "reference": "what a kernel computes, by torch's operators",
    "refusal": "every kind of kernel and of graph is asked why it cannot run",
}
MOST_MEANINGS = 2  # values of one constant's name in all modules


def top_level(path: Path) -> Iterator[tuple[str, str]]:
    """(name, value) of the public functions, with the value "", and of the constants of a module."""
    for node in parsed(path).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                yield name, ""
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                yield name, ast.unparse(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name.isupper():
                yield name, ast.unparse(value)


def test_one_module_owns_a_function_name() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in files():
        for name, value in top_level(path):
            if not value:
                places[name].add(path.relative_to(ROOT).as_posix())
    shared = {name: sorted(found) for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if name not in SAME_FUNCTION_NAMES} == {}
    assert SAME_FUNCTION_NAMES.keys() - shared.keys() == set(), "take these from the list"


def test_a_constant_has_few_meanings() -> None:
    values: dict[str, set[str]] = defaultdict(set)
    for path in files():
        for name, value in top_level(path):
            if value:
                values[name].add(value)
    assert {name: sorted(found) for name, found in values.items() if len(found) > MOST_MEANINGS} == {}
