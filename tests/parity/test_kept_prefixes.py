"""What prompts begin with stays on the disk: a later process computes only what is new, and never takes what is not
its own."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import hf_accel
from hf_accel import CacheConfig, Engine, HfAccelWarning, PagedCache, UnsupportedError
from hf_accel.cache import block_folder
from hf_accel.cache.block_folder import BLOCK_FILE, BlockFolder
from hf_accel.cache.group import PageGroup
from hf_accel.cache.kept_blocks import GroupFolder
from hf_accel.generation.hf.model_identity import ModelIdentity
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.undo.state import state_of

from ..selection import some_long
from .families import DECODER, build, prompts
from .test_compressed import model_of
from .test_shared_prefixes import MODELS, NEEDS_KERNELS, STATES
from .together import WAIT, alone

BLOCK = 4
MOST = 2**30
PROMPT = prompts(1, 83)[0].tolist()
OTHERS = [PROMPT[:40] + row for row in prompts(2, 19, seed=5).tolist()]
OF_MODELS = ("windows and full", "convolutions", "states", "mamba2", "zamba", "gated units")
KINDS = {kind: MODELS[kind] for kind in OF_MODELS}
KINDS |= {"compressed": lambda: model_of("DeepseekV3"), "full": lambda: build("llama")}


def served(folder: Path, model: Any, ids: list[list[int]], *, dtype: Any = "auto", **settings: Any) -> Any:
    """Patch a model and serve prompts one after the other; returns their tokens, and the statistics."""
    max_tokens, size = settings.pop("max_tokens", None), settings.pop("block_size", BLOCK)
    hf_accel.patch(model, weights=None, cache=cache_in(folder, dtype=dtype, block_size=size, max_tokens=max_tokens))
    with Engine(model, **settings) as engine:
        tokens = [engine.submit(row, max_new_tokens=9).result(WAIT).tokens for row in ids]
    return tokens, engine.stats


def cache_in(folder: Path, **settings: Any) -> CacheConfig:
    return CacheConfig(**{"block_size": BLOCK, "directory": str(folder), **settings})


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if BLOCK_FILE.fullmatch(path.name))


@pytest.mark.parametrize(
    "kind",
    some_long([pytest.param(kind, marks=NEEDS_KERNELS if kind in STATES else ()) for kind in KINDS], "zamba", "full"),
)
def test_a_later_process_goes_on_behind_what_was_kept(kind: str, tmp_path: Path) -> None:
    size = 16 if kind == "mamba2" else BLOCK  # no layer of which has keys and values
    ids = [PROMPT, OTHERS[0]]
    expected = [alone(KINDS[kind](), row, 9) for row in ids]
    found, first = served(tmp_path, KINDS[kind](), ids)
    assert found == expected and first["kept_blocks_written"] > 0 and first["kept_blocks_read"] == 0
    for row, tokens in zip(ids, expected, strict=True):
        found, later = served(tmp_path, KINDS[kind](), [row], token_budget=16)
        assert found == [tokens] and later["kept_blocks_read"] > 0 == later["kept_blocks_refused"]
        assert later["computed_tokens"] <= len(row) % size + size + 9
    found, later = served(tmp_path, KINDS[kind](), [[*PROMPT, *expected[0], 7, 7, 7]])
    assert later["computed_tokens"] <= size + 3 * 9  # the next turn of the chat


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_pages(dtype: str, tmp_path: Path) -> None:
    expected, _ = served(tmp_path / "none", build("llama"), [PROMPT], dtype=dtype)
    assert served(tmp_path, build("llama"), [PROMPT], dtype=dtype)[0] == expected
    found, later = served(tmp_path, build("llama"), [PROMPT], dtype=dtype)
    assert found == expected and later["kept_blocks_read"] == (len(PROMPT) - 1) // BLOCK


def llama(**other: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**DECODER | other)).eval()


def one_bit(model: Any) -> Any:
    weight = model.model.layers[1].mlp.down_proj.weight.data.view(torch.int32)
    weight[3, 5] ^= 1
    return model


CHANGES: dict[str, Any] = {
    "one bit of one weight": lambda: one_bit(llama()),
    "rope": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 10001.0}),
    "scaled rope": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "the dtype": lambda: llama().bfloat16(),
    "a setting": lambda: llama(rms_norm_eps=1e-5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_finds_nothing(change: str, tmp_path: Path) -> None:
    served(tmp_path, llama(), [PROMPT])
    model = CHANGES[change]()
    expected, _ = served(tmp_path / "none", CHANGES[change](), [PROMPT])
    found, later = served(tmp_path, model, [PROMPT])
    assert later["kept_blocks_read"] == 0 < later["kept_blocks_written"] and found == expected
    assert served(tmp_path, llama(), [PROMPT])[1]["kept_blocks_read"] > 0


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"block_size": 8}])
def test_other_pages_find_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    served(tmp_path, llama(), [PROMPT])
    assert served(tmp_path, llama(), [PROMPT], **settings)[1]["kept_blocks_read"] == 0


def test_an_adapter_finds_its_own_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for name in "ab":
        model = llama()
        torch.manual_seed(ord(name))
        outer = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False))
        outer.save_pretrained(tmp_path / name)
    read = {}
    for name in ("a", "b", None, "a", None):
        hf_accel.patch(model := llama(), weights=None, cache=cache_in(tmp_path / "kept", block_size=16))
        with Engine(model) as engine:
            for each in "ab":
                engine.load_adapter(each, tmp_path / each)
            request = engine.submit(PROMPT, max_new_tokens=9, adapter=name)
            read.setdefault(name, []).append((request.result(WAIT).tokens, engine.stats["kept_blocks_read"]))
    assert [count for _, count in read["a"] + read[None]] == [0, 5, 0, 5] and read["b"][0][1] == 0
    assert all(len({tuple(tokens) for tokens, _ in each}) == 1 for each in read.values())


def damage(path: Path, others: list[Path], numbers: random.Random) -> None:
    """Make something else of a file."""
    content = bytearray(path.read_bytes())
    way = numbers.randrange(9)
    if way == 0:
        content = content[: numbers.randrange(len(content))]
    elif way == 1:
        content += bytes(numbers.randint(1, 99))
    elif way == 2:
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    elif way == 3:
        content[:8] = (2**63 - 1).to_bytes(8, "little")  # what a header of that length would be
    elif way == 4:
        content = bytearray(numbers.randbytes(len(content)))
    elif way == 5:
        start = numbers.randrange(len(content))
        content[start:] = bytes(len(content) - start)  # torn by a loss of power
    elif way == 6:
        content = bytearray(numbers.choice([each for each in others if each != path]).read_bytes())
    path.unlink()
    if way == 7:
        path.mkdir()
    elif way == 8:
        path.symlink_to(numbers.choice([each for each in others if each != path]))
    else:
        path.write_bytes(content)


def test_a_hundred_hostile_files(tmp_path: Path) -> None:
    """Each is refused. Files of other models and of other tokens under the name of a right one are among them."""
    numbers, group = random.Random(0), _group(7)
    digests = [bytes([number]) * 16 for number in range(32)]
    for model in ("model", "another"):
        files = GroupFolder(BlockFolder(tmp_path / model, MOST), group, model, BLOCK)
        for digest, row in zip(digests, files._gathered(list(range(32))).numpy(), strict=True):
            files.write(digest, row.data)
    others = files_of(tmp_path)
    for number in range(100):
        path = numbers.choice(files_of(tmp_path / "model"))
        content = path.read_bytes()
        damage(path, others, numbers)
        reading = _group(8)
        files = GroupFolder(BlockFolder(tmp_path / "model", MOST), reading, "model", BLOCK)
        assert not files.read([bytes.fromhex(path.stem)]) and len(reading.index or ()) == 0, number
        assert files.folder.num_refused == 1 and files.folder.num_read == 0
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(content)
        assert files.read([bytes.fromhex(path.stem)])


def test_tokens_with_damaged_files(tmp_path: Path) -> None:
    numbers = random.Random(1)
    expected, _ = served(tmp_path, llama(), [PROMPT])
    for round_ in range(4):
        files = files_of(tmp_path)
        for path in numbers.sample([each for each in files if each.is_file() and not each.is_symlink()], 2):
            damage(path, files, numbers)
        found, later = served(tmp_path, llama(), [PROMPT])
        assert found == expected and later["kept_blocks_refused"] > 0, round_


def test_a_file_is_a_safetensors_file(tmp_path: Path) -> None:
    served(tmp_path, llama(), [PROMPT])
    for path in files_of(tmp_path):
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
            assert opened.get_tensor("block").dtype is torch.uint8
        assert metadata["digest"] == path.stem and metadata["key"] == path.parent.parent.name


def _group(seed: int) -> PageGroup:
    """Pages with random numbers in the first 32 blocks."""
    group = PageGroup(
        window=None, num_blocks=64, block_size=BLOCK, growable=False, prefix_sharing=True, quantized=None
    )
    torch.manual_seed(seed)
    for layer in range(2):
        states = torch.randn(32 * BLOCK, 2, 8)
        group.storage(layer, states, states).write(states, -states, torch.arange(32 * BLOCK))
    return group


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, to be killed")
def test_killed_processes_leave_whole_files(tmp_path: Path) -> None:
    """Some write the same blocks at once, and are killed at any moment: each file that is there is right."""
    numbers, group = random.Random(2), _group(7)
    digests = [bytes([number]) * 16 for number in range(32)]
    for _ in range(8):
        children = [_write_for_ever(tmp_path, group, digests) for _ in range(2)]
        time.sleep(numbers.uniform(0, 0.03))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        reading = _group(8)
        files = GroupFolder(BlockFolder(tmp_path, MOST), reading, "model", BLOCK)
        there = [digest for digest in digests if digest in files]
        assert files.read(there) and files.folder.num_refused == 0
        assert reading.index is not None
        for digest in there:
            place, block = reading.index.find(digest), digests.index(digest)
            assert place is not None
            assert torch.equal(reading.storages[1].pages.k[place], group.storages[1].pages.k[block])
        for path in files_of(tmp_path)[:: numbers.randint(1, 3)]:
            path.unlink()
    assert there


def _write_for_ever(folder: Path, group: PageGroup, digests: list[bytes]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        files = GroupFolder(BlockFolder(folder, MOST), group, "model", BLOCK)
        content = files._gathered(list(range(len(digests)))).numpy()
        while True:
            for digest, row in zip(digests, content, strict=True):
                files.write(digest, row.data)
    finally:
        os._exit(1)


def test_the_least_recently_used_blocks_go_first(tmp_path: Path) -> None:
    (foreign := tmp_path / "notes.txt").write_text("not ours")
    size = None
    for number, ids in enumerate([PROMPT, *OTHERS]):
        served(tmp_path, llama(), [ids])
        size = size or sum(path.stat().st_size for path in files_of(tmp_path))
        assert size is not None
        BlockFolder(tmp_path, int(size * 1.2)).make_room()
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= size * 1.2, number
    assert served(tmp_path, llama(), [OTHERS[1]])[1]["kept_blocks_read"] == (len(OTHERS[1]) - 1) // BLOCK
    assert served(tmp_path, llama(), [PROMPT])[1]["kept_blocks_read"] < (len(PROMPT) - 1) // BLOCK
    assert foreign.read_text() == "not ours"


def test_unfinished_files_of_killed_processes_go(tmp_path: Path) -> None:
    served(tmp_path, llama(), [PROMPT])
    left = files_of(tmp_path)[0].with_name(".0011.hf_accel-unfinished")
    left.write_bytes(b"half")
    BlockFolder(tmp_path, MOST).make_room()
    assert left.exists()  # somebody may write it now
    os.utime(left, (0, 0))
    BlockFolder(tmp_path, MOST).make_room()
    assert not left.exists()


def test_what_a_changed_model_computes_is_never_kept_as_the_old_one(tmp_path: Path) -> None:
    hf_accel.patch(model := llama(), weights=None, cache=cache_in(tmp_path))
    with Engine(model) as engine:
        first = engine.submit(PROMPT, max_new_tokens=9).result(WAIT).tokens
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)
        other = engine.submit(PROMPT, max_new_tokens=9).result(WAIT).tokens
        assert engine.stats["kept_blocks_read"] == 0
    found, later = served(tmp_path, llama(), [PROMPT])
    assert found == [first] != [other] and later["kept_blocks_read"] == (len(PROMPT) - 1) // BLOCK
    with torch.no_grad():
        (changed := llama()).model.embed_tokens.weight.mul_(1.5)
    found, later = served(tmp_path, changed, [PROMPT])
    assert found == [other] and later["kept_blocks_read"] == (len(PROMPT) - 1) // BLOCK


def test_what_is_computed_before_a_change_is_seen_is_dropped(tmp_path: Path) -> None:
    """A change within the time between two looks: nothing of that time is written under the old name."""
    hf_accel.patch(model := llama(), weights=None, cache=cache_in(tmp_path))
    engine = Engine(model)
    session = engine.session
    session.add(request := _sequence(PROMPT))
    while not request.is_finished:
        session._looked = time.monotonic()
        if request.num_computed >= 40:
            model.model.embed_tokens.weight.data.mul_(1.5)  # which torch does not count
        session.step()
    session.close()
    assert not files_of(tmp_path)
    engine.close()


def _sequence(ids: list[int]) -> Any:
    from hf_accel.generation.sampling.sampling import Sampling
    from hf_accel.generation.sequence import Sequence

    return Sequence(list(ids), RequestSettings(9, Sampling()))


def test_a_cache_of_fixed_size_reads_no_more_than_fits(tmp_path: Path) -> None:
    ids = [PROMPT, OTHERS[0], OTHERS[1]]
    expected, _ = served(tmp_path, llama(), ids)
    hf_accel.patch(model := llama(), weights=None, cache=cache_in(tmp_path, max_tokens=100))
    with Engine(model) as engine:
        requests = [engine.submit(row, max_new_tokens=9) for row in ids * 2]
        assert [each.result(WAIT).tokens for each in requests] == expected * 2
        assert engine.stats["kept_blocks_read"] > 0


def test_a_cache_that_is_saved_and_loaded(tmp_path: Path) -> None:
    ids = torch.tensor([PROMPT])
    hf_accel.patch(model := llama(), weights=None)
    cache = PagedCache(model.config, block_size=BLOCK)
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, past_key_values=cache)
    assert cache.save(tmp_path, model) == len(files_of(tmp_path)) >= len(PROMPT) // BLOCK
    assert cache.save(tmp_path, model) == 0
    hf_accel.patch(later := llama(), weights=None)
    cache = PagedCache(later.config, block_size=BLOCK)
    cache.load(tmp_path, later)
    found = later.generate(ids, max_new_tokens=9, do_sample=False, past_key_values=cache)
    assert torch.equal(found, expected) and cache.statistics()["prefix_hits"] >= (len(PROMPT) - 1) // BLOCK
    later.model.embed_tokens.weight.data.mul_(1.5)
    cache.reset()
    found = later.generate(ids, max_new_tokens=9, do_sample=False, past_key_values=cache)
    fresh = later.generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(found, fresh) and not torch.equal(fresh, expected)


def test_what_is_refused(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(UnsupportedError, match=r"call hf_accel\.patch\(model\) first"):
        PagedCache(model.config).save(tmp_path, model)
    with pytest.raises(UnsupportedError, match="directory='' names no folder"):
        CacheConfig(directory="")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    for name, why in (("open", "can be written to by other users"), ("file", "is no folder for prompts")):
        if name == "file" or os.name == "posix":
            with (
                hf_accel.patched(model, weights=None, cache=cache_in(tmp_path / name)),
                pytest.raises(UnsupportedError, match=why),
            ):
                Engine(model)
    hf_accel.patch(model, weights=None, cache=cache_in(tmp_path / "kept"))
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"a hook of model\.layers\.0 is code of no package that is known"):
        Engine(model)
    handle.remove()
    with Engine(model) as engine:
        engine.submit(PROMPT, max_new_tokens=2).result(WAIT)
        model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.warns(HfAccelWarning, match="because the model was changed"):
            engine.submit(PROMPT, max_new_tokens=2).result(WAIT)
    model = llama()
    hf_accel.patch(model, weights=None, cache=cache_in(tmp_path / "kept", prefix_sharing=False))
    with pytest.raises(UnsupportedError, match="its sequences share no beginnings"):
        Engine(model)


def test_blocks_are_left_out_where_they_cannot_be_written_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_folder, "MOST_PENDING", 1)
    _, stats = served(tmp_path, llama(), [PROMPT])
    assert stats["kept_blocks_skipped"] > 0 == stats["kept_blocks_written"] and not files_of(tmp_path)


def moe() -> Any:
    torch.manual_seed(0)
    sizes = DECODER | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()


@pytest.mark.parametrize("weights", [None, "int8", {"bits": 4, "group_size": 32}], ids=str)
def test_every_weight_counts_in_each_format(weights: Any) -> None:
    """The digest is of what is multiplied by, packed or not."""

    def digest(changed: str = "") -> str:
        model = moe()
        with torch.no_grad():
            if changed:
                model.get_parameter(changed).view(-1)[-1] += 1
        hf_accel.patch(model, weights=weights)
        return ModelIdentity(model, state_of(model).config).digest()

    names = [name for name, _ in moe().named_parameters()]
    found = {name: digest(name) for name in ["", *names]}
    assert len(set(found.values())) == len(found) == len(names) + 1 and digest() == found[""]


def test_requests_change_nothing_in_what_a_model_is() -> None:
    hf_accel.patch(model := moe(), weights="int8")
    before = ModelIdentity(model, state_of(model).config).digest()
    with Engine(model) as engine:
        engine.submit(PROMPT, max_new_tokens=5).result(WAIT)
    model.generate(torch.tensor([PROMPT]), max_new_tokens=3)
    assert ModelIdentity(model, state_of(model).config).digest() == before
