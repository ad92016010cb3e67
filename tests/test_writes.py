"""Who writes to a model: the only files that do, and how. See docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from benchmarks.structure import parsed

from .test_architecture import FILES, module_name

# Rooms that never hold a model: their setattr is about their own objects.
WITHOUT_MODELS = ("cache.group", "generation.hf.processing", "kernels", "keywords", "undo.journal")
WRITERS = {
    # a user's model, through the journal; configs that the journal has put in the place of the user's
    "patching.patch": {"journal", "config"},
    "patching.pack": {"journal", "dict"},
    # a head and configs that a user has changed since, which stay
    "patching.unpatch": {"setattr", "data"},
    "patching.nf4_model": {"journal", "config"},
    "patching.originals": {"journal", "config"},
    "attention.hf.stock": {"config", "dict"},
    # storage of weights that the journal has put aside
    "parallel.tensor": {"data"},
    # shapes without numbers, to be counted, and copies of single norms, to be tried
    "checkpoints.ladder": {"dict"},
    "fused.norms": {"dict"},
    # a model that from_pretrained is making, before anybody has it
    "checkpoints.checkpoint": {"setattr", "submodule", "dict"},
    "checkpoints.load": {"config"},
    "checkpoints.loading": {"config", "dict"},
    "checkpoints.readers.gguf_reader": {"config"},
    # what transformers writes into config.json
    "linear.hf": {"config", "dict"},  # and a copy of our own
    # copies of our own
    "checkpoints.writers.save_compressed": {"config", "submodule"},
    "linear.experts": {"dict"},
    "linear.nf4": {"dict"},
    "generation.hf.engine": {"config"},
    "generation.hf.given_decoder": {"config"},
    "generation.hf.config_settings": {"config"},
    "generation.hf.encoder_source": {"config"},  # that generate() has made for a call
    "generation.hf.states_drafters": {"class", "config", "dict"},
    "generation.hf.request_config": {"config", "setattr"},
    "generation.sampling.purity": {"dict"},  # of a processor
    "recognition.position_attention": {"dict"},
    "recognition.distance_attention": {"dict"},
    "recognition.gated_bias": {"dict"},
    "recognition.row_convolution": {"dict"},
    "recognition.paired_rotation": {"dict"},
    "recognition.rotated_inputs": {"dict"},
    "recognition.windowed_attention": {"dict"},
    "recognition.trial": {"dict"},
    "recognition.small_model": {"class", "dict"},
    "patching.calibration": {"hook", "submodule"},
    "estimate.shapes": {"dict", "submodule"},
    "recurrent.hf.convolutions": {"class"},
    "recurrent.hf.state_pass": {"dict"},
    "recurrent.hf.delta_attention": {"dict"},
    "fused.hf.indexers": {"class", "dict"},
    "fused.hf.source_layers": {"class"},
    "fused.hf.mask_readers": {"class"},
    "fused.hf.operator_models": {"class", "dict"},
    "patching.sequence_survey": {"class", "dict"},
    "recurrent.hf.selective_scans": {"dict"},
    "recurrent.hf.state_spaces": {"dict"},
    "recurrent.hf.gated_units": {"dict"},
    "recurrent.hf.headed_scans": {"dict"},
    "recurrent.hf.lightning": {"dict"},
    "recurrent.hf.matrix_memories": {"dict"},
    "recurrent.hf.time_mixes": {"dict"},
    "fused.hf.sites": {"class", "dict"},
    "generation.hf.head_runner": {"hook"},  # on a draft's own layer, within a call
    "generation.hf.pass_states": {"dict"},  # hooks, within a pass
    "linear.adapters": {"hook"},  # within a pass
    "patching.twin": {"dict"},
    "verify.references": {"setattr", "submodule"},
    "verify.rounding": {"hook"},
    # notes on a tensor of one forward pass, and on a process that is being started
    "cache.hf.layers": {"setattr"},
    "linear.layer": {"dict"},
    "linear.layer_state": {"dict"},
    # a resized model that was tied before it was quantized
    "linear.quantized_model": {"setattr", "config"},
    # ours, which is the original class again when it is resized
    "linear.embedding": {"class", "dict", "setattr"},
    # tensors that a quantized layer lends
    "linear.writable": {"class", "data"},
    # the package's own module
    "": {"class"},
    # the signature of a command, from its options
    "cli.options": {"dict"},
    # a student, while it is made or trained
    "distill": {"config", "data", "hook", "setattr"},
}
DICTS = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
METHODS = {"setattr": "setattr", "delattr": "setattr", "set_submodule": "submodule"}


def writes(tree: ast.AST) -> Iterator[str]:
    """The kinds of writes in a file that could be to a model, a parameter or a config."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                yield from (kind for target in targets for kind in assigned(target))
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                yield from assigned(target)
            case ast.Call(func=function):
                yield from called(ast.unparse(function))


def assigned(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from assigned(element)
    elif isinstance(target, ast.Attribute | ast.Subscript):
        owner, name = ast.unparse(target.value), getattr(target, "attr", "")
        if name in ("__class__", "data"):
            yield name.strip("_")
        elif name in DICTS or (isinstance(target, ast.Subscript) and holds_entries(owner)):
            yield "dict"
        elif name and owner != "self" and (".config." in owner or owner.rpartition(".")[2].endswith("config")):
            yield "config"


def called(function: str) -> Iterator[str]:
    owner, _, name = function.rpartition(".")
    if owner.endswith("journal") and name in ("attribute", "item"):
        yield "journal"
    elif name in METHODS:
        yield METHODS[name]
    elif name.startswith("register_") and name.endswith("_hook"):
        yield "hook"
    elif name in ("pop", "update", "setdefault", "clear") and holds_entries(owner):
        yield "dict"


def holds_entries(owner: str) -> bool:
    """Whether an expression is the dict of an object that is not the writer's own."""
    own = owner in ("vars(self)", "self.__dict__") or owner.startswith("self._")
    return not own and (owner.startswith("vars(") or owner.endswith((".__dict__", *DICTS)))


def test_only_these_files_write_to_a_model() -> None:
    found: dict[str, set[str]] = {}
    for path in FILES:
        module = module_name(path)
        if not any(module == room or module.startswith(f"{room}.") for room in WITHOUT_MODELS):
            kinds = set(writes(parsed(path)))
            writer = next((w for w in WRITERS if module == w or module.startswith(f"{w}.")), module)
            found[writer] = found.get(writer, set()) | kinds
    assert {writer: kinds for writer, kinds in found.items() if kinds} == WRITERS


def test_attributes_on_a_model_are_named_in_one_file() -> None:
    notes = {"cache.hf.layers", "linear.layer_state"}
    for path in FILES:
        nodes = ast.walk(parsed(path))
        strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        named = [string for string in strings if string.startswith("_hf_accel")]
        assert not named or module_name(path) in {"undo.state"} | notes
