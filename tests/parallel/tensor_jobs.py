"""What the ranks of the tensor parallel tests do, and what one process does to compare with it."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_accel
from hf_accel.cache.hf.room import token_bytes
from hf_accel.generation.hf.graphed_runner import model_refusal_of_graphs
from hf_accel.generation.hf.session import heads_of_rank
from hf_accel.generation.speculation.drafters.ngram import NgramDrafter
from hf_accel.linear import QuantLinear
from hf_accel.linear.formats import state
from hf_accel.patching.originals import fingerprint
from hf_accel.tensors import is_plain_tensor, is_sharded, local_tensor, plain_tensors
from hf_accel.undo.state import state_of

from .ranks import set_timeout

VOCABULARY, NEW = 256, 8
INT4 = {"bits": 4, "group_size": 32}
WEIGHTS = {"float": None, "int8": "int8", "int4": INT4}


def save_llama(folder: Path, **settings: Any) -> str:
    """A tiny Llama with random weights, which are large enough that no two tokens are nearly as good."""
    torch.manual_seed(1)
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}  # halves of whole blocks of 64
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.3, **{**shape, **heads, **settings})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return str(folder)


def prompts() -> list[list[int]]:
    """Of several lengths; some begin alike, and one repeats itself, so that n-grams of it are found again."""
    numbers = random.Random(3)
    common = [numbers.randrange(VOCABULARY) for _ in range(33)]
    tails = [[numbers.randrange(VOCABULARY) for _ in range(n)] for n in (1, 4, 9)]
    return [*(common + tail for tail in tails), tails[2], tails[1] * 5]


def load(path: str, plan: Any = "auto", *, split: bool = True) -> Any:
    """The model in float32: this rank's part of it, or all of it."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=distributed.get_world_size(), tp_plan=plan) if split else None
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=config).eval()


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, rows: list[list[int]], **keywords: Any) -> list[list[int]]:
    inputs = padded(rows)
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **keywords)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def engine_tokens(model: Any, rows: list[list[int]], *, late: float = 0.0, **settings: Any) -> list[list[int]]:
    with hf_accel.Engine(model, token_budget=24, **settings) as engine:
        requests = []
        for row in rows:
            time.sleep(late)
            requests.append(engine.submit(row, max_new_tokens=NEW, temperature=0))
        return [request.result().tokens for request in requests]


def greedy_answers(model: Any) -> dict[str, list[list[int]]]:
    """The greedy tokens of all prompts, in each way to get them."""
    rows = prompts()
    batch = model.generate_batch(rows, max_new_tokens=NEW, do_sample=False)
    drafted = model.generate_batch(rows, max_new_tokens=NEW, do_sample=False, speculative="ngram")
    always = hf_accel.SpeculativeConfig(drafter="ngram", num_draft=3)
    return {
        "generate": generated(model, rows),
        "one by one": [generated(model, [row])[0] for row in rows],
        "chunks": generated(model, rows[:3], prefill_chunk_size=7),
        "batch": [output.generated_tokens for output in batch.values()],
        "speculative batch": [output.generated_tokens for output in drafted.values()],
        "speculative": generated(model, rows, speculative=always),
        "engine": engine_tokens(model, rows),
        "engine, few pages": engine_tokens(model, rows, max_tokens=160, max_running=3),
        "beams": generated(model, rows[:2], num_beams=2),
    }


def ended_answers(model: Any) -> list[list[int]]:
    """Rows that end early, whose last tokens are computed for a next turn over the cache."""
    stop = generated(model, prompts())[0][2]
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": stop, "return_dict_in_generate": True}
    return model.generate(**padded(prompts()), max_new_tokens=NEW, **settings).sequences.tolist()


def sampled_answers(model: Any) -> dict[str, Any]:
    """Sampled tokens: with seeds, and, last, without, so that each rank's generator stands elsewhere."""
    rows = prompts()
    torch.manual_seed(5)
    seeded = model.generate(**padded(rows), max_new_tokens=NEW, do_sample=True, pad_token_id=0).tolist()
    with hf_accel.Engine(model) as engine:
        requests = [engine.submit(row, max_new_tokens=NEW, temperature=0.9, seed=7, n=2) for row in rows]
        served = [sample.tokens for request in requests for sample in request.results()]
    torch.manual_seed(100 + (distributed.get_rank() if distributed.is_initialized() else 0))
    loose = model.generate(**padded(rows), max_new_tokens=NEW, do_sample=True, pad_token_id=0).tolist()
    rejected = hf_accel.SpeculativeConfig(drafter="ngram", num_draft=3)
    drafted = model.generate(
        **padded(rows), max_new_tokens=NEW, do_sample=True, pad_token_id=0, speculative=rejected
    ).tolist()
    return {"seeded": seeded, "served": served, "unseeded": loose, "unseeded, drafted": drafted}


def last_logits(model: Any, rows: list[list[int]]) -> list[list[list[float]]]:
    """The logits at each place of each row, by the model's own forward."""
    with torch.no_grad():
        return [model(torch.tensor([row]), use_cache=False).logits[0].tolist() for row in rows]


# -- what a rank holds ---------------------------------------------------------------------------------------


def held_bytes(model: Any) -> dict[str, int]:
    """Bytes of each weight that a model computes with, by the name of its module, packed as they are."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            found[name] = sum(tensor.nbytes for tensor in packed_tensors(module))
        elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            found[name] = local_tensor(module.weight).nbytes
    return found


def packed_tensors(layer: QuantLinear) -> Iterator[Tensor]:
    weight = layer.pack()._packed.weight
    yield from (value for value in vars(weight).values() if isinstance(value, Tensor))


def alive_bytes() -> int:
    """Bytes of all tensors that Python holds, each once. The rest of a file that a part was read from is not held."""
    gc.collect()
    tensors = [part for one in gc.get_objects() if issubclass(type(one), Tensor) for part in plain_tensors(one)]
    plain = [part for part in tensors if is_plain_tensor(part) and part.is_cpu]  # DTensor leaves fake ones behind
    return sum({part.data_ptr(): part.nbytes for part in plain}.values())


def stored_weights(model: Any) -> dict[str, dict[str, Tensor]]:
    """The integers and scales of each quantized layer."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    return {name: dict(state(layer.quantized)) for name, layer in layers.items()}


def page_shape(model: Any) -> list[int]:
    cache = hf_accel.PagedCache(model.config)
    generated(model, prompts()[:1], past_key_values=cache)
    return list(cache.pages.groups[0].storages[0].pages.k.shape[1:])


def wait_at_most(model: Any, seconds: float) -> None:
    """Give the collectives of a model's ranks another timeout."""
    set_timeout(seconds, state_of(model).generation.agreement.group)  # type: ignore[attr-defined]


# -- the jobs ------------------------------------------------------------------------------------------------


def job_answers(path: str, kind: str, plan: Any = "auto") -> dict[str, Any]:
    """All that one kind of weights is asked for, on a model that is loaded once."""
    fingerprint(torch.zeros(1))  # which makes a table
    before = alive_bytes()
    model = load(path, plan)
    originals = {name: local_tensor(p).clone() for name, p in model.named_parameters()}
    objects = {name: id(p) for name, p in model.named_parameters()}
    split = [name.removesuffix(".weight") for name, p in model.named_parameters() if is_sharded(p)]
    loaded = alive_bytes() - before - sum(tensor.nbytes for tensor in originals.values())
    hf_accel.patch(model, weights=WEIGHTS[kind])
    held = held_bytes(model)
    patched = alive_bytes() - before - sum(tensor.nbytes for tensor in originals.values())
    found = {
        "plan": str(state_of(model).description["choices"]),
        "held": held,
        "token": token_bytes(model, hf_accel.CacheConfig(), heads_of_rank(model)),
        "graphs": model_refusal_of_graphs(model),
        "split": split,
        "alive": (loaded, patched),
        "greedy": greedy_answers(model),
        "ended": ended_answers(model),
        "sampled": sampled_answers(model),
        "logits": last_logits(model, prompts()[:2]),
        "weights": stored_weights(model),
        "pages": page_shape(model),
    }
    hf_accel.unpatch(model)
    after = {name: local_tensor(p) for name, p in model.named_parameters()}
    assert after.keys() == originals.keys()
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert all(torch.equal(after[name], originals[name]) for name in originals)
    assert sum(is_sharded(p) for p in model.parameters()) > 0
    found["stock again"] = generated(model, prompts()[:2])
    return found


def job_other_decisions(path: str) -> tuple[list[list[int]], int, list[int]]:
    """Speculation whose controller decides otherwise on each rank, as it may by the seconds that it measures."""
    model, rank = load(path), distributed.get_rank()
    hf_accel.patch(model, weights=None)
    wait_at_most(model, 40.0)
    decided: list[int] = []

    class Noted(NgramDrafter):
        def propose(self, sequences: Any, lengths: Any) -> Any:
            decided.extend(lengths)
            return super().propose(sequences, lengths)

    drafts = hf_accel.SpeculativeConfig(drafter=Noted(2, 5), num_draft=3 - 2 * rank)
    outputs = model.generate_batch(prompts(), max_new_tokens=2 * NEW, do_sample=False, speculative=drafts)
    return [output.generated_tokens for output in outputs.values()], hf_accel.stats(model)["passes"], decided


def job_engine_out_of_step(path: str) -> dict[str, Any]:
    """Requests and cancellations that reach each rank at other times."""
    model, rank = load(path), distributed.get_rank()
    hf_accel.patch(model, weights=None)
    wait_at_most(model, 40.0)
    tokens = engine_tokens(model, prompts(), late=0.01 * (1 + 3 * rank))
    with hf_accel.Engine(model) as engine:
        long = engine.submit(prompts()[0], max_new_tokens=400, temperature=0)
        other = engine.submit(prompts()[1], max_new_tokens=NEW, temperature=0)
        others = other.result().tokens
        if rank == 0:
            long.cancel()
        ended = long.result().finish_reason
    return {"tokens": tokens, "other": others, "ended": ended, "used": used_blocks(engine.session.pages)}


def used_blocks(pages: Any) -> int:
    """Blocks that sequences hold; those of cached prefixes are free to be taken."""
    return sum(group.pool.num_used for group in pages.groups)


def job_refusals(path: str, folder: str) -> dict[str, str]:
    """The message of each request that cannot be met."""
    found = {}
    model = load(path)
    tries = {
        "nf4": lambda: hf_accel.patch(model, weights="nf4"),
        "fp8": lambda: hf_accel.patch(model, weights="fp8"),
        "gptq": lambda: hf_accel.patch(
            model, weights=hf_accel.WeightConfig(bits=4, group_size=32, method="gptq", calibration=[[1, 2, 3]])
        ),
        "auto": lambda: hf_accel.patch(model, weights="auto"),
        "self-int4": lambda: hf_accel.patch(model, weights=None, speculative="self-int4"),
        "group": lambda: hf_accel.patch(model, weights={"bits": 4, "group_size": 128}),
        "loading": lambda: AutoModelForCausalLM.from_pretrained(
            path, quantization_config=hf_accel.AccelConfig(weights="int8"), distributed_config=config_of(model)
        ),
    }
    for name, attempt in tries.items():
        found[name] = message_of(attempt)
        assert not hf_accel.is_patched(model), name
    hf_accel.patch(model)
    ids = torch.tensor([[1, 2, 3]])
    patched = {
        "save": lambda: model.save_pretrained(folder),
        "compressed": lambda: hf_accel.save_compressed(model, folder),
        "verify": lambda: hf_accel.verify(model, [[1, 2, 3]]),
        "max_time": lambda: model.generate(ids, max_new_tokens=2, max_time=1.0),
        "max_time batch": lambda: model.generate_batch([[1, 2]], max_new_tokens=2, max_time=1.0),
        "drafts": lambda: model.generate(ids, max_new_tokens=2, speculative="self-int4"),
        "gradient": lambda: model(inputs_embeds=torch.zeros(1, 2, 256, requires_grad=True)),
    }
    return found | {name: message_of(attempt) for name, attempt in patched.items()}


def job_family(path: str, plan: Any = "auto") -> dict[str, Any]:
    """What a model of any family says, split: stock, exact and quantized."""
    rows, found = prompts(), {}
    if plan != "auto":  # which older transformers do not add to the model's own
        own = AutoConfig.from_pretrained(path).base_model_tp_plan
        plan = {f"model.{name}": style for name, style in own.items()} | {"lm_head": "colwise_gather_output"} | plan
    model = load(path, plan)
    found["stock"] = generated(model, rows)
    for kind in ("float", "int8", "int4"):
        hf_accel.patch(model, weights=WEIGHTS[kind])
        batch = model.generate_batch(rows, max_new_tokens=NEW, do_sample=False)
        found[kind] = generated(model, rows)
        found[f"{kind} batch"] = [output.generated_tokens for output in batch.values()]
        found[f"{kind} loop"] = hf_accel.stats(model)["loop"]
        found[f"{kind} logits"] = last_logits(model, rows[:1])
        choices = state_of(model).description["choices"]
        found[f"{kind} plan"] = [choice["reason"] for choice in choices if choice["topic"] == "weights"]
        found[f"{kind} parts"] = sorted(
            {type(m).__name__ for m in model.modules() if isinstance(m, QuantLinear) and m.part}
        )
        hf_accel.unpatch(model)
    found["stock again"] = generated(model, rows)
    hf_accel.patch(model, keep_original=False)
    found["dropped"] = message_of(lambda: hf_accel.unpatch(model))
    return found


def job_other_callers(path: str, draft: str) -> dict[str, Any]:
    """A draft model, which each rank has whole, and transformers' manager of continuous batching."""
    model, rows = load(path), prompts()
    hf_accel.patch(model, weights=None)
    helper = load(draft, split=False)
    torch.manual_seed(distributed.get_rank())
    sampled = model.generate(
        **padded(rows), max_new_tokens=NEW, do_sample=True, pad_token_id=0, assistant_model=helper
    ).tolist()
    found = {"draft": generated(model, rows, speculative=helper), "sampled": sampled}
    config = model.generation_config
    config.max_new_tokens, config.do_sample = NEW, False
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for number, row in enumerate(rows):
            manager.add_request(row, request_id=str(number))
        outputs = {}
        while len(outputs) < len(rows):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                outputs[output.request_id] = output.generated_tokens
    return found | {"manager": [outputs[str(number)] for number in range(len(rows))]}


def config_of(model: Any) -> Any:
    return model.config.distributed_config


def message_of(attempt: Any) -> str:
    try:
        attempt()
    except hf_accel.HfAccelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
