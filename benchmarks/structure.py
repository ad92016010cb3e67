"""The code in numbers: sizes, what one step passes through, circles, repetition, the time of an import.

python -m benchmarks.structure            count this tree; the columns of other commits stay as they are in the file
python -m benchmarks.structure PATH...    count those too, work trees of other commits
--accept "COUNT=FEATURE" is needed for each count of WORSE_IF_MORE that rose by more than 3 %.

Only Python's own library is needed to count; what runs hf_accel runs in processes of their own (structure_run.py).
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .harness.machine import machine, versions
from .harness.results_folder import FOLDER, write
from .harness.tables import Table

TOPIC = "structure"
COMMAND = "python -m benchmarks.structure"
THIS = "this tree"
ACCEPTED = "accepted"  # the column that says which feature brought a count that rose
SLACK = 1.03  # how far a count of WORSE_IF_MORE may rise above the table before the tests fail
NOTE = (
    "Columns are commits. Lines of code leave out blanks, comments and docstrings. Files are those of hf_accel whose "
    "functions run. Parameters leave out self; positional ones are those that may be given without their name."
)
HERE = Path(__file__).parents[1]
PACKAGE = "hf_accel"
FOLDERS = ("hf_accel", "tests", "benchmarks", "examples")
MOST_PARAMETERS, MOST_POSITIONAL, MOST_LINES = 6, 4, 60
OURS_OF_MANY = "of these, functions whose signature is ours to choose"
SAME_LINES = 6  # lines in a row that stand twice
# Functions whose signature is not ours to choose. A command's options are its parameters; operators of torch take no
# objects; a kernel in Triton's language takes each pointer and each stride.
GIVEN_BY_DECORATOR = ("triton.jit", "torch.library.", "common(")
GIVEN_BY_DECORATOR_METHOD = (".register_fake", ".register_kernel")
GIVEN_BY_NAME = {  # qualified name -> the library that calls it, or has it under the same name
    "attention_forward": "transformers",
    "mask_forward": "transformers",
    "AcceleratedGeneration._sample": "transformers",
    "AcceleratedGeneration._assisted_decoding": "transformers",
    "AcceleratedGeneration._beam_search": "transformers",
    "AcceleratedGeneration.generate_batch": "transformers",
    "ContinuousManager.add_request": "transformers",
    "DistillationMixin.evaluation_loop": "transformers",
    "QuantModule._load_from_state_dict": "torch",
    "_DifferentiableLinear.forward": "torch.autograd",
}
WORSE_IF_MORE = (
    "lines of code, hf_accel, Python",
    "lines of code, hf_accel, C++",
    "lines in all, hf_accel, Python",
    "lines in all, hf_accel, C++",
    "modules at the root",
    "rooms",
    "files of a decode step",
    "files of generate()",
    "files of patch()",
    "public names, imported at once",
    f"functions of more than {MOST_LINES} lines",
    f"functions of more than {MOST_PARAMETERS} parameters",
    OURS_OF_MANY,
    f"functions of more than {MOST_POSITIONAL} positional ones",
    "names of two or more files",
    "names of two or more classes",
    "import circles",
    "import circles, with types",
    "modules in them",
    f"lines that stand twice, {SAME_LINES} in a row",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


# -- lines ---------------------------------------------------------------------------------------------------


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def code_lines(path: Path) -> dict[int, str]:
    """Line numbers that hold code, and the code: without blanks, comments and docstrings, white space folded."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return {number: line for number, line in enumerate(without_comments(text), 1) if line}
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    documented = set(docstring_lines(parsed(path)))
    words: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.start[0] not in documented:
            for number, line in enumerate(token.string.splitlines() or [""], token.start[0]):
                words[number].append(line.strip())
    return {number: " ".join(line) for number, line in words.items()}


def docstring_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def without_comments(text: str) -> list[str]:
    """The lines of C++, with what its comments leave of them."""
    kept = re.sub(r"/\*.*?\*/", lambda found: "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    return [" ".join(re.sub(r"//.*", "", line).split()) for line in kept.splitlines()]


def sources(tree: Path, folder: str, *endings: str) -> list[Path]:
    return sorted(path for ending in endings for path in (tree / folder).rglob(f"*{ending}"))


def repeated_lines(files: Sequence[Path]) -> int:
    """Lines of code that belong to a run of SAME_LINES which stands somewhere else too; imports do not count."""
    places: dict[tuple[str, ...], list[tuple[Path, list[int]]]] = defaultdict(list)
    for path in files:
        lines = [(number, line) for number, line in code_lines(path).items() if is_telling(line)]
        for start in range(len(lines) - SAME_LINES + 1):
            window = lines[start : start + SAME_LINES]
            places[tuple(line for _, line in window)].append((path, [number for number, _ in window]))
    return len({(path, n) for found in places.values() if len(found) > 1 for path, numbers in found for n in numbers})


def is_telling(line: str) -> bool:
    return re.search(r"\w", line) is not None and not line.startswith(("import ", "from "))


# -- definitions ---------------------------------------------------------------------------------------------


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, Function, bool]]:
    """(qualified name, definition, whether it is a method) of each in a file."""
    for node in statements(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{owner}.{node.name}".lstrip(".") if named else owner  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node, isinstance(tree, ast.ClassDef)
        yield from functions(node, name)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands directly in a node of the kinds that hold statements: an expression holds none."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        found = getattr(node, name, ())
        if isinstance(found, list):  # the body of a lambda is an expression
            yield from found


def parameters(function: Function, is_method: bool) -> tuple[int, int]:
    """How many there are beside self or cls, and how many of them are positional."""
    given = function.args
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
    positional = len(given.posonlyargs) + len(given.args) - (is_method and not static)
    rest = (given.vararg is not None) + (given.kwarg is not None)
    return positional + len(given.kwonlyargs) + rest, positional


def is_given(name: str, function: Function) -> bool:
    """Return True for a function whose signature another library, or the command line, gives. name: qualified."""
    if name in GIVEN_BY_NAME:
        return True
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(one.startswith(GIVEN_BY_DECORATOR) or one.endswith(GIVEN_BY_DECORATOR_METHOD) for one in decorators)


def num_lines(function: Function) -> int:
    """From its first decorator on."""
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return (function.end_lineno or first) - first + 1


def names_of_two(files: Sequence[Path]) -> tuple[int, int]:
    """File names, and names of classes at the top of a file, that stand more than once."""
    stems = Counter(path.stem for path in files if path.stem not in ("__init__", "hf"))
    classes = Counter(node.name for path in files for node in parsed(path).body if isinstance(node, ast.ClassDef))
    return sum(n > 1 for n in stems.values()), sum(n > 1 for n in classes.values())


# -- imports -------------------------------------------------------------------------------------------------


def import_graph(tree: Path, *, with_types: bool, folder: str = PACKAGE) -> dict[str, set[str]]:
    """module -> modules of the same folder that it names in an import, inside functions too."""
    files = sources(tree, folder, ".py")
    names = {module_name(tree, path): path for path in files}
    return {
        name: {found for found in imported(path, name, names, with_types=with_types) if found != name}
        for name, path in names.items()
    }


def module_name(tree: Path, path: Path) -> str:
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, module: str, known: dict[str, Path], *, with_types: bool) -> Iterator[str]:
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in nodes(parsed(path), with_types=with_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from [name for name in (f"{origin}.{alias.name}", origin) if name in known][:1]


def nodes(tree: ast.AST, *, with_types: bool) -> Iterator[ast.AST]:
    """The statements of a file. with_types: also those that only a type checker reads."""
    for node in statements(tree):
        if with_types or not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from nodes(node, with_types=with_types)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that each reach all of their group (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


# -- what runs -----------------------------------------------------------------------------------------------


def passed_files(tree: Path) -> dict[str, list[str]]:
    """Files of the package that patch(), generate() and one step of it pass through, by structure_run.py."""
    return json.loads(python(tree, str(Path(__file__).parent / "harness" / "structure_run.py")).splitlines()[-1])


def import_seconds(tree: Path, times: int) -> tuple[float, float]:
    """Of transformers' own model class alone, and with hf_accel before it: medians, taken in turns."""
    alone, both = "from transformers import LlamaForCausalLM", "import hf_accel"
    clock = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
    taken: dict[str, list[float]] = {alone: [], f"{both}; {alone}": []}
    for code in taken:
        python(tree, "-c", code)  # compiled, and read from the disk, before any is timed
    for _ in range(times):
        for code, seconds in taken.items():
            seconds.append(float(python(tree, "-c", clock.format(code)).splitlines()[-1]))
    first, second = (statistics.median(seconds) for seconds in taken.values())
    return first, second


def python(tree: Path, *arguments: str) -> str:
    """What a process with `tree` in front of its path prints."""
    path = {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **path}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} in {tree.name}: {done.stderr.strip()[-2000:]}")
    return done.stdout


# -- the table -----------------------------------------------------------------------------------------------


def count(tree: Path, passed: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Every number of one tree. passed: what passed_files() found in it."""
    found = count_package(tree, passed)
    first = {name: found.pop(name) for name in list(found)[:2]}
    for folder in FOLDERS[1:]:
        first[f"lines of code, {folder}"] = sum(len(code_lines(path)) for path in sources(tree, folder, ".py"))
    return first | found


def count_package(tree: Path, passed: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The numbers of the package alone, among them all of WORSE_IF_MORE."""
    python_files = sources(tree, PACKAGE, ".py")
    native_files = sources(tree, PACKAGE, ".cpp", ".h")
    found: dict[str, float] = {
        "lines of code, hf_accel, Python": sum(len(code_lines(path)) for path in python_files),
        "lines of code, hf_accel, C++": sum(len(code_lines(path)) for path in native_files),
        "lines in all, hf_accel, Python": lines_in_all(python_files),
        "lines in all, hf_accel, C++": lines_in_all(native_files),
        "files, hf_accel, Python": len(python_files),
        "modules at the root": len(list((tree / PACKAGE).glob("*.py"))),
        "rooms": len(list((tree / PACKAGE).glob("*/__init__.py"))),
        "files of a decode step": len(passed["step"]),
        "files of generate()": len(passed["generate"]),
        "files of patch()": len(passed["patch"]),
        "public names": len(passed["public"]),
        "public names, imported at once": len(passed["eager"]),
    }
    found |= of_functions([function for path in python_files for function in functions(parsed(path))])
    two_files, two_classes = names_of_two(python_files)
    with_types = circles(import_graph(tree, with_types=True))
    return found | {
        "names of two or more files": two_files,
        "names of two or more classes": two_classes,
        "import circles": len(circles(import_graph(tree, with_types=False))),
        "import circles, with types": len(with_types),
        "modules in them": sum(map(len, with_types)),
        f"lines that stand twice, {SAME_LINES} in a row": repeated_lines([*python_files, *native_files]),
    }


def lines_in_all(files: Sequence[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def of_functions(defined: Sequence[tuple[str, Function, bool]]) -> dict[str, float]:
    """How many functions there are, and how many are long or take much."""
    counted = [parameters(function, is_method) for _, function, is_method in defined]
    many = [(name, f) for (n, _), (name, f, _) in zip(counted, defined, strict=True) if n > MOST_PARAMETERS]
    return {
        "functions": len(defined),
        f"functions of more than {MOST_LINES} lines": sum(num_lines(f) > MOST_LINES for _, f, _ in defined),
        f"functions of more than {MOST_PARAMETERS} parameters": len(many),
        OURS_OF_MANY: sum(not is_given(name, f) for name, f in many),
        f"functions of more than {MOST_POSITIONAL} positional ones": sum(n > MOST_POSITIONAL for _, n in counted),
    }


def of_imports(tree: Path, times: int) -> dict[str, float]:
    """The time of an import, measured `times` times; nothing for 0 times."""
    if not times:
        return {}
    alone, both = import_seconds(tree, times)
    return {
        "seconds to import a model class": round(alone, 3),
        "seconds with hf_accel": round(both, 3),
        "percent longer": round(100 * (both / alone - 1), 1),
    }


def worse(counts: Mapping[str, float], before: Mapping[str, float | None]) -> dict[str, str]:
    """Counts of WORSE_IF_MORE that rose above those `before` by more than SLACK allows, with both numbers."""
    return {
        name: f"{number:g} became {counts[name]:g}"
        for name in WORSE_IF_MORE
        if (number := before.get(name)) is not None and counts[name] > SLACK * number
    }


def commit_of(tree: Path) -> str:
    words = ["git", "-C", str(tree), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trees", nargs="*", type=Path, help="work trees of other commits, with their kernels compiled")
    parser.add_argument("--imports", type=int, default=7, help="times that imports are timed; 0 leaves them out")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--accept", action="append", default=[], metavar="COUNT=FEATURE", help="what brought a rise")
    arguments = parser.parse_args(argv)
    columns = known_columns(arguments.out / f"{TOPIC}.json")
    before = columns.pop(THIS, {})
    accepted = {name: why for name, why in columns.pop(ACCEPTED, {}).items() if why}
    accepted |= {name: why for name, _, why in (given.partition("=") for given in arguments.accept)}
    for tree in [*arguments.trees, HERE]:
        counts = count(tree.resolve(), passed_files(tree.resolve())) | of_imports(tree.resolve(), arguments.imports)
        columns[THIS if tree is HERE else commit_of(tree)] = counts
    given = {given.partition("=")[0] for given in arguments.accept}
    refused = {name: how for name, how in worse(columns[THIS], before).items() if name not in given}
    if refused:
        parser.error(
            f"these rose by more than 3 %: {refused}; make them less, or give --accept 'COUNT=FEATURE' for each"
        )
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [
        {"count": name, **{title: column.get(name) for title, column in columns.items()}, ACCEPTED: accepted.get(name)}
        for name in names
    ]
    table = Table("The code in numbers", rows, NOTE)
    print(table.markdown())
    write(arguments.out, record(table))


def known_columns(path: Path) -> dict[str, dict[str, Any]]:
    """The columns that stand in the file, by their titles."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["tables"][0]["rows"]
    return {title: {row["count"]: row[title] for row in rows} for title in rows[0] if title != "count"}


def record(table: Table) -> dict[str, Any]:
    """The result in the form that every topic has."""
    return {
        "topic": TOPIC,
        "date": datetime.date.today().isoformat(),
        "command": COMMAND,
        "model": "a Llama of two layers",
        "settings": {},
        "machine": machine(),
        "versions": versions(),
        "verified": [],
        "refused": {},
        "tables": [asdict(table)],
    }


if __name__ == "__main__":
    main()
