"""The shape of the code: who imports whom, what is public, what is documented. See docs/architecture.md."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hf_accel
from benchmarks.structure import nodes, parsed

PACKAGE = Path(hf_accel.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# What `state` holds has types of higher rooms, which it imports for the type checker alone.
FACTS = {"config", "errors", "hardware", "keywords", "models", "tensors", "undo"}
FACTS_NEED = {
    "hardware.atomic": {"filelock"},
    "hardware.device": {"psutil"},
}  # what each system has in a way of its own
CORE = {  # room -> the rooms before it
    "recognition": set(),
    "kernels": set(),
    "cache": {"kernels"},
    "attention": {"recognition", "kernels", "cache"},
    "linear": {"recognition", "kernels", "cache"},
    "fused": {"recognition", "kernels", "cache", "attention", "linear"},
    "recurrent": {"recognition", "kernels", "cache", "attention", "linear", "fused"},
    "generation": {"recognition", "kernels", "cache", "attention", "linear", "fused"},
    "distill": {"kernels", "cache", "generation"},
}
DISTILL = ["losses", "model_loss", "teachers", "trainer", "drafts"]  # its rooms: each may use those before it
TORCH_ALONE = {"losses", "drafts.kept_layers", "teachers.top_logits"}  # the others know transformers
ABOVE = {"distill": {"patching"}}  # of composition, for a room's seam: a student samples, and a draft runs, patched
OTHER_PACKAGES = {
    "distill": {"accelerate", "safetensors", "tqdm"},  # tqdm: transformers requires it
    "patching": {"accelerate", "numpy", "optimum"},  # numpy: transformers requires it
    "checkpoints": {"gguf"},
    "serving": {
        "PIL",
        "fastapi",
        "prometheus_client",
        "pydantic",
        "pydantic_core",
        "soundfile",
        "soxr",
        "starlette",
        "tokenizers",
        "uvicorn",
    },
    "cli": {"optimum", "rich", "typer"},
}
COMPOSITION = [  # each may use those before it
    "parallel",
    "patching",
    "estimate",
    "checkpoints",
    "verify",
    "serving",
    "cli",
    "__main__",
]
BOOKKEEPING = {  # and what that may use
    "cache.pool",
    "config",
    "config.layout",
    "config.patch_config",
    "config.weight_config",
    "errors",
    "generation.sampling.stopping",
    "generation.scheduling.scheduler",
    "generation.sequence",
    "generation.engine.stream",
    "generation.speculation.acceptance",
    "generation.speculation.controller",
    "generation.speculation.draft_choice",
    "generation.speculation.costs",
    "generation.speculation.draft_sources",
    "generation.speculation.drafters.drafter",
    "generation.speculation.drafters.ngram",
    "generation.speculation.drafters.suffix",
    "keywords",
}

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "other"}
LONGEST_FILE = 360
LONGER = {  # files that hold one subject in more lines, which may only become fewer
    "generation/engine/engine_loop.py": 432,
    "generation/hf/continuous.py": 426,
    "generation/scheduling/scheduler.py": 447,
}

PUBLIC_NAMES = [
    "AccelConfig",
    "CacheConfig",
    "Certificate",
    "DistillationCallback",
    "DistillationConfig",
    "DistillationMixin",
    "DistillationSettings",
    "DistillationTrainer",
    "Draft",
    "DraftHead",
    "Drafter",
    "Engine",
    "Estimate",
    "HfAccelError",
    "HfAccelWarning",
    "OutOfBlocksError",
    "PagedCache",
    "PatchConfig",
    "Plan",
    "SpeculativeConfig",
    "TeacherCache",
    "UnsupportedError",
    "WeightConfig",
    "distill_draft",
    "distillation_loss",
    "estimate",
    "init_student",
    "is_patched",
    "load",
    "measure_acceptance",
    "patch",
    "patched",
    "plan",
    "quantization_report",
    "save_compressed",
    "save_gguf",
    "stats",
    "unpatch",
    "verify",
    "weights_changed",
]
KEYWORDS = {
    "patch": [
        "weights", "attention", "cache", "fuse", "speculative", "keep_original", "deterministic", "context_parallel",
        "config",
    ],
    "verify": ["reference", "tokenizer", "max_new_tokens", "text"],
    "estimate": [
        "context", "batch", "weights", "kv_dtype", "dtype", "bandwidth", "compute", "compute_fp8", "price_per_hour",
        "device",
    ],
    "WeightConfig": [
        "format", "group_size", "symmetric", "activations", "method", "calibration", "resume", "average_bits",
        "eight_bits", "skip", "head", "embedding", "only_if_faster",
    ],
    "quantization_report": ["reference"],
    "CacheConfig": ["block_size", "max_tokens", "prefix_sharing", "directory", "directory_bytes"],
    "SpeculativeConfig": ["drafter", "num_draft", "max_draft", "max_nodes", "verify", "ngram"],
    "Engine": ["max_tokens", "token_budget", "max_running", "speculative"],
    "save_gguf": ["tokenizer"],
    "save_compressed": ["activations", "tokenizer", "max_shard_size"],
    "distillation_loss": [
        "alpha", "temperature", "loss", "beta", "eta", "shift", "num_items", "ignore_index", "vocab_size",
    ],
    "DistillationCallback": ["alpha", "temperature", "loss", "beta", "eta", "shift", "fused"],
    "init_student": ["num_layers", "layers", "strategy", "dataset", "tokenizer", "dtype", "share_embeddings"],
    "measure_acceptance": [
        "temperature", "max_draft", "max_tokens", "prompt_tokens", "max_new_tokens", "batch_size", "tokenizer", "seed",
        "progress_bar",
    ],
    "distill_draft": [
        "kind", "head_tokens", "num_layers", "layers", "strategy", "loss", "alpha", "temperature", "regenerate",
        "prompt_tokens", "max_length", "max_steps", "batch_size", "learning_rate", "args", "share_embeddings",
        "tokenizer", "measure", "seed", "progress_bar",
    ],
}  # fmt: skip


def module_name(path: Path) -> str:
    """ "cache.pool" for hf_accel/cache/pool.py, "cache" for its __init__, "" for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, *, types: bool = False) -> set[str]:
    """Absolute names of what a file imports anywhere, like "hf_accel.cache.pool". types: also what only types need."""
    package = ["hf_accel", *path.relative_to(PACKAGE).parent.parts]
    return {name for node in nodes(parsed(path), with_types=types) for name in imported(node, package)}


def imported(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = package[: len(package) - node.level + 1] if node.level else []
    module = [*base, *(node.module or "").split(".")] if node.module else base
    name = ".".join(module)
    is_package = (PACKAGE.parent / Path(*module)).is_dir()
    return [f"{name}.{alias.name}" if is_package and is_module(module, alias.name) else name for alias in node.names]


def is_module(package: list[str], name: str) -> bool:
    path = PACKAGE.parent / Path(*package) / name
    return path.is_dir() or path.with_suffix(".py").is_file()


def inner(names: set[str]) -> set[str]:
    """The modules of hf_accel among the names, without the prefix."""
    return {name.removeprefix("hf_accel.") for name in names if name.split(".")[0] == "hf_accel"}


def outer(names: set[str]) -> set[str]:
    """The packages among the names that are neither hf_accel's nor Python's own."""
    roots = {name.split(".")[0] for name in names}
    return roots - set(sys.stdlib_module_names) - {"hf_accel"}


def is_seam(module: str) -> bool:
    """hf.py, a file in a folder hf/, or a file of distill that is not of torch alone."""
    room, _, rest = module.partition(".")
    if room == "distill":
        return bool(rest) and not any(f"{rest}.".startswith(f"{alone}.") for alone in TORCH_ALONE)
    return "hf" in module.split(".")


def each_file(*rooms: str) -> Iterator[tuple[str, set[str]]]:
    """The name of each module of some rooms, and what it imports."""
    for path in FILES:
        if module_name(path).split(".")[0] in rooms:
            yield module_name(path), imports(path)


def test_every_room_has_its_layer() -> None:
    rooms = {module_name(path).split(".")[0] for path in FILES} - {""}
    assert rooms == FACTS | CORE.keys() | set(COMPOSITION)


def test_facts_know_nothing_but_torch() -> None:
    for module, names in each_file(*FACTS):
        assert outer(names) <= {"torch"} | FACTS_NEED.get(module, set()), module
        assert {name.split(".")[0] for name in inner(names)} <= FACTS, module


def test_core_rooms_stand_in_order() -> None:
    for module, names in each_file(*CORE):
        room = module.split(".")[0]
        above = ABOVE.get(room, set()) if is_seam(module) else set()
        assert {name.split(".")[0] for name in inner(names)} <= FACTS | {room} | CORE[room] | above, module
        packages = {"torch", "transformers"} | OTHER_PACKAGES.get(room, set())
        own = {"torch", "triton"} if module.startswith("kernels.triton") else {"torch"}
        assert outer(names) <= (packages if is_seam(module) else own), module
        if not is_seam(module):
            assert not [name for name in inner(names) if is_seam(name)], f"{module} would bring transformers with it"


def test_rooms_of_distillation_stand_in_order() -> None:
    for module, names in each_file("distill"):
        room = module.split(".")[1:2]
        before = set(DISTILL[: DISTILL.index(room[0]) + 1]) if room else set()
        assert {name.split(".")[1] for name in inner(names) if name.startswith("distill.")} <= before, module


def test_composition_stands_in_order() -> None:
    for module, names in each_file(*COMPOSITION):
        room = module.split(".")[0]
        before = set(COMPOSITION[: COMPOSITION.index(room) + 1])
        if room == "cli":
            before.add("hf_accel")  # as users import it
        assert {name.split(".")[0] for name in inner(names)} <= FACTS | CORE.keys() | before, module
        packages = {"torch", "transformers", "safetensors"} | OTHER_PACKAGES.get(room, set())
        assert outer(names) <= packages, module


def circles() -> list[list[str]]:
    """Sets of files each of which imports, over the others, itself; imports that only types need count too."""
    known = {module_name(path) for path in FILES}
    below = {module_name(path): inner(imports(path, types=True)) & known for path in FILES}
    reached: dict[str, set[str]] = {}
    for start in below:
        seen: set[str] = set()
        waiting = list(below[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += below[name]
        reached[start] = seen
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in below if a in reached[a]}
    return sorted(sorted(circle) for circle in found)


def test_no_imports_go_in_a_circle() -> None:
    assert circles() == []


def test_bookkeeping_needs_no_torch() -> None:
    for module in BOOKKEEPING:
        folder = PACKAGE / module.replace(".", "/")
        names = imports(folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py"))
        assert not outer(names), module
        assert inner(names) <= BOOKKEEPING, module


def test_files_are_small_and_well_named() -> None:
    for path in FILES:
        assert not FORBIDDEN_NAMES & {part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts}, path
        most = LONGER.get(path.relative_to(PACKAGE).as_posix(), LONGEST_FILE)
        assert len(path.read_text(encoding="utf-8").splitlines()) <= most, path


def test_long_files_are_counted() -> None:
    lines = {name: len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in LONGER}
    assert {name: count for name, count in lines.items() if count <= LONGEST_FILE} == {}, "take these from the list"


def test_public_names_are_a_decision() -> None:
    assert sorted(hf_accel.__all__) == PUBLIC_NAMES
    with pytest.raises(AttributeError, match="'hf_accel' has no attribute 'pach'") as raised:
        hf_accel.pach  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("pach", hf_accel), "Python proposes names that it finds by these"
    assert set(dir(hf_accel)) == {*PUBLIC_NAMES, "__version__"}, "pack.py is no name that a user means"


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    """What __init__ imports for types is what it imports when a name is asked for."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == hf_accel._LAZY


@pytest.mark.parametrize("name", KEYWORDS)
def test_public_keywords_are_a_decision(name: str) -> None:
    parameters = inspect.signature(getattr(hf_accel, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == KEYWORDS[name]


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "is_patched"])  # whose name says it all
def test_public_names_are_documented(name: str) -> None:
    documented = getattr(hf_accel, name).__doc__
    assert documented and not documented.startswith(f"{name}("), "it needs words, not the signature of a dataclass"


def public_definitions(path: Path) -> list[ast.FunctionDef | ast.ClassDef]:
    body = parsed(path).body
    return [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]


def needs_words(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a definition is too long for its name and types to say it all."""
    return node.end_lineno is not None and node.end_lineno - node.lineno > 10


def test_long_definitions_are_documented() -> None:
    for path in FILES:
        definitions = public_definitions(path)
        if len(definitions) == 1 and ast.get_docstring(parsed(path)):
            continue  # the file's own words are about it
        assert [node.name for node in definitions if needs_words(node) and not ast.get_docstring(node)] == [], path
