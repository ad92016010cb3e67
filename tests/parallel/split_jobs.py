"""What ranks do with the state of a split model, and with models that are split in other ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hf_accel
from hf_accel.linear import QuantLinear
from hf_accel.tensors import is_sharded

from .tensor_jobs import INT4, generated, last_logits, load, message_of, prompts


def facts(model: Any) -> dict[str, tuple[str, list[int], bool]]:
    """Of each tensor of a state_dict: its type and shape, and whether it tells of the whole."""
    return {name: (type(x).__name__, list(x.shape), is_sharded(x)) for name, x in model.state_dict().items()}


def job_states(path: str, folder: str) -> dict[str, Any]:
    """What state_dict() gives, and which models take it."""
    rank = distributed.get_rank()
    model = load(path)
    found: dict[str, Any] = {"stock": facts(model)}
    hf_accel.patch(model, weights=None)
    found["exact"] = facts(model)
    hf_accel.unpatch(model)
    hf_accel.patch(model, weights=INT4)
    state = {name: x for name, x in model.state_dict().items() if not is_sharded(x)}  # torch.save takes no DTensors
    found["parts"] = [name for name in state if ".rank_" in name]
    found["other names"] = [name for name in state if "_proj" in name and ".rank_" not in name]
    torch.save(state, f"{folder}/{rank}.pt")
    logits = last_logits(model, prompts()[:1])
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            layer.write(torch.zeros(layer.out_features, layer.in_features))
    found["forgotten"] = last_logits(model, prompts()[:1]) != logits
    distributed.barrier()
    own, others = (torch.load(f"{folder}/{number}.pt") for number in (rank, 1 - rank))
    model.load_state_dict(own | {name: x for name, x in model.state_dict().items() if is_sharded(x)})
    found["back"] = last_logits(model, prompts()[:1]) == logits
    whole = load(path, split=False)
    hf_accel.patch(whole, weights=INT4)
    for name, taker, given in (
        ("other", model, others),
        ("whole takes a part", whole, own),
        ("part takes the whole", model, whole.state_dict()),
    ):
        found[name] = _said(taker, {key: x for key, x in given.items() if "embed" not in key})
    checkpoint.save(own, checkpoint_id=f"{folder}/checkpoint")  # keeps one tensor of a name, of some rank
    back = {name: torch.zeros_like(x) for name, x in own.items()}
    checkpoint.load(back, checkpoint_id=f"{folder}/checkpoint")
    found["checkpoint"] = all(torch.equal(back[name], own[name]) for name in own)
    found["kept"] = last_logits(model, prompts()[:1]) == logits
    return found


def _said(model: Any, state: dict[str, Any]) -> str:
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return str(error)
    return "loaded"


def job_saved(path: str, folder: str) -> dict[str, Any]:
    """save_pretrained of parts is refused; what the message advises works."""
    model = load(path)
    hf_accel.patch(model, weights=INT4)
    found: dict[str, Any] = {"said": message_of(lambda: model.save_pretrained(folder))}
    hf_accel.unpatch(model)
    model.save_pretrained(folder)
    distributed.barrier()
    found["tokens"] = generated(load(folder, split=False), prompts()[:2])
    return found


def job_other_splits(path: str) -> dict[str, str]:
    """What is said to models that are split in other ways than by tensor parallel, alone or beside it."""
    model, found = load(path), {}
    config = model.config.distributed_config
    for name in ("fsdp_size", "pp_size", "ep_size", "dp_replicate_size"):
        before = getattr(config, name, 1)
        setattr(config, name, 2)
        found[name] = message_of(lambda: hf_accel.patch(model))
        setattr(config, name, before)
    model.config.distributed_config = SimpleNamespace(tp_size=2, enable_expert_parallel=True)
    found["experts of older transformers"] = message_of(lambda: hf_accel.patch(model))
    stages = load(path, split=False)  # a stage of a pipeline holds whole tensors
    stages.config.distributed_config = SimpleNamespace(pp_size=2)
    found["pipeline alone"] = message_of(lambda: hf_accel.patch(stages))
    found["torch's FSDP"] = message_of(lambda: hf_accel.patch(_fully_sharded(load(path, split=False))))
    model.config.distributed_config = config
    mesh = init_device_mesh("cpu", (1, 2))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            whole = torch.zeros(layer.out_features, layer.in_features)
            layer.weight = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
    embedding = torch.zeros(model.config.vocab_size, model.config.hidden_size)
    model.model.embed_tokens.weight = nn.Parameter(distribute_tensor(embedding, mesh, [Replicate(), Shard(0)]))
    found["two dimensions"] = message_of(lambda: hf_accel.patch(model))
    return found


def _fully_sharded(model: Any) -> Any:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model
