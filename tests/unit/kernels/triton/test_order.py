"""Launches that overlap: where they are made, and that each waits before it reads or writes what others share."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_accel.kernels import triton
from hf_accel.kernels.triton.launch import OVERLAPS, Launch

PROGRAMS = Path(triton.__file__).parent / "programs"
WAIT, BEGIN = "wait_for_the_one_before", "let_the_next_begin"
# No launch of a graph writes to parameters of the model: so these alone may be read before the launch waits. (Scales
# and biases are parameters too, but are needed so late that nothing is won.)
WEIGHTS = ("integers", "weight")

FUNCTIONS = {
    each.name: each
    for path in sorted(PROGRAMS.glob("*.py"))
    for each in ast.parse(path.read_text()).body
    if isinstance(each, ast.FunctionDef)
}
OVERLAPPING = [
    name
    for name, each in FUNCTIONS.items()
    if OVERLAPS in [arg.arg for arg in each.args.args] and name not in (WAIT, BEGIN)
]


class Order:
    """Follows a kernel in the order of its code, into the functions that it calls.

    wrong: what it does before it has waited, and what it should not do until then.
    """

    def __init__(self, name: str) -> None:
        self.wrong: list[str] = []
        self.num_stores = 0
        names = {arg.arg: arg.arg for arg in FUNCTIONS[name].args.args}
        self.waits = self.follow(FUNCTIONS[name].body, names, False)

    def follow(self, body: list[ast.stmt], names: dict[str, str], waited: bool) -> bool:
        """names: the parameter of the kernel behind each name. Returns whether every way through has waited."""
        for statement in body:
            match statement:
                case ast.If():
                    waited = self.see(statement.test, names, waited)
                    ways = [self.follow(way, names, waited) for way in (statement.body, statement.orelse)]
                    waited = all(ways)
                case ast.For() | ast.While():
                    head = statement.iter if isinstance(statement, ast.For) else statement.test
                    waited = self.see(head, names, waited)
                    self.follow(statement.body, names, waited)  # which may never run
                case _:
                    waited = self.see(statement, names, waited)
                    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                        names[statement.targets[0].id] = origin(statement.value, names)
        return waited

    def see(self, node: ast.AST, names: dict[str, str], waited: bool) -> bool:
        for child in ast.iter_child_nodes(node):
            waited = self.see(child, names, waited)
        if not isinstance(node, ast.Call):
            return waited
        called = ast.unparse(node.func)
        if called == WAIT:
            return waited or origin(node.args[0], names) == OVERLAPS
        if called in FUNCTIONS and called != BEGIN:
            function = FUNCTIONS[called]
            parameters = [arg.arg for arg in function.args.args]
            given = dict(zip(parameters, node.args, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
            own = {name: origin(value, names) for name, value in given.items()}
            return self.follow(function.body, own, waited)
        is_store = called == "tl.store" or called.startswith("tl.atomic")
        self.num_stores += is_store
        if not waited and (is_store or called == BEGIN or called == "tl.load"):
            of = origin(node.args[0], names)
            if called != "tl.load" or of.rstrip("_0123456789") not in WEIGHTS:
                self.wrong.append(f"{called} of {of} in line {node.lineno}")
        return waited


def origin(node: ast.expr, names: dict[str, str]) -> str:
    """The parameter to which an expression like `x + row * width` adds."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_kernel_waits_before_it_reads_and_writes(name: str) -> None:
    assert not Order(name).wrong


def test_the_check_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"multiply_few", "multiply_by_some", "norm", "attend", "write"} <= set(OVERLAPPING)
    assert Order("multiply_few").num_stores == 1 and Order("norm").waits

    def order(body: str) -> Order:
        head = f"def made(x, weight, out, {OVERLAPS}):\n"
        [made] = ast.parse(head + "".join(f"    {line}\n" for line in body.splitlines())).body
        monkeypatch.setitem(FUNCTIONS, "made", made)  # type: ignore[arg-type]
        return Order("made")

    wait = f"{WAIT}({OVERLAPS})"
    assert not order(f"tl.load(weight + 1)\n{wait}\ntl.store(out, tl.load(x))").wrong
    assert order(f"here = x + 1\ntl.load(here)\n{wait}").wrong == ["tl.load of x in line 3"]
    assert order(f"tl.store(out, 1)\n{wait}").wrong and order(f"{BEGIN}({OVERLAPS})\n{wait}").wrong
    assert order(f"if x:\n    {wait}\ntl.load(x)").wrong and order(f"{WAIT}(False)\ntl.load(x)").wrong
    assert not order(f"if x:\n    {wait}\nelse:\n    {wait}\ntl.load(x)").wrong


@pytest.mark.parametrize(
    ("capability", "overlaps"), [((0, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_launches_overlap_within_the_block_and_its_thread(
    capability: tuple[int, int], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "capability", lambda: capability)

    def launch(*names: str) -> tuple[bool, bool]:
        made = Launch(kernel=SimpleNamespace(arg_names=["x", *names]), grid=(1,), arguments={}, constants={"A": 1})
        constants = made.constants_for(overlaps=triton.overlap())
        assert constants["A"] == 1 and (OVERLAPS in constants) is bool(names)
        return bool(constants.get(OVERLAPS)), bool(made.options.get("launch_pdl"))

    assert launch(OVERLAPS) == (False, False)
    with triton.overlapping():
        assert launch(OVERLAPS) == (overlaps, overlaps)
        assert launch() == (False, False)  # it begins when the one before it has ended, as it cannot wait
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(launch, OVERLAPS).result() == (False, False)
        with pytest.raises(ZeroDivisionError), triton.overlapping():
            _: Any = 1 / 0
        assert triton.overlap() is overlaps
    assert launch(OVERLAPS) == (False, False)
