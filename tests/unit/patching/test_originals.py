from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_accel import HfAccelError, UnsupportedError
from hf_accel.patching.originals import (
    CHAIN,
    CHUNK_SIZE,
    Originals,
    Source,
    _multipliers,
    checkpoint_files,
    fingerprint,
    parameter_bytes,
    read_tensor,
    readable,
)


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_single_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    files = checkpoint_files(str(tmp_path))
    assert files == dict.fromkeys("ab", tmp_path / "model.safetensors")
    assert torch.equal(read_tensor(files["a"], "a"), torch.ones(2))


def test_shards(tmp_path: Path) -> None:
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    assert checkpoint_files(str(tmp_path)) == {name: tmp_path / file for name, file in names.items()}


@pytest.mark.parametrize("folder", [None, "", "no/such/folder"])
def test_no_checkpoint(folder: str | None) -> None:
    assert checkpoint_files(folder) == {}


def test_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert checkpoint_files(str(tmp_path)) == {}


UNLIKE = [
    torch.tensor([1.0, 2.5]),
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([[1.0, 2.0]]),
    torch.tensor([1.0, 2.0, 3.0]),
]


@pytest.mark.parametrize("other", UNLIKE, ids=str)
def test_fingerprint_tells_apart(other: Tensor) -> None:
    assert fingerprint(torch.tensor([1.0, 2.0])) != fingerprint(other)


def test_fingerprint_sees_bits_and_not_layout() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.tensor([torch.nan])) == fingerprint(torch.tensor([torch.nan]))
    square = torch.arange(6.0).view(2, 3)
    assert fingerprint(square.t()) == fingerprint(square.t().contiguous())


def test_fingerprint_is_the_sum_that_it_says() -> None:
    """In Python's integers, over several chunks and a last word that is not whole."""
    tensor = torch.randint(-128, 128, (3, 8 * CHUNK_SIZE + 9), dtype=torch.int8)[1:]  # starts at an odd byte
    data = bytes(tensor.numpy().tobytes())
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<i8").tolist()
    factors, total = _multipliers().tolist(), 0
    for start in range(0, len(words), CHUNK_SIZE):
        chunk = words[start : start + CHUNK_SIZE]
        total = (total * CHAIN + sum(w * f for w, f in zip(chunk, factors, strict=False))) % 2**64
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == CHUNK_SIZE
    assert fingerprint(tensor) == f"torch.int8 {tuple(tensor.shape)} {total:016x}"


@pytest.mark.parametrize("numel", [1, 3, 4, 2**17 + 1])
@pytest.mark.parametrize("offset", [0, 1])
def test_fingerprint_sees_one_bit_anywhere(numel: int, offset: int) -> None:
    tensor = torch.randn(numel + offset).to(torch.bfloat16)[offset:]
    before = fingerprint(tensor)
    for place in {0, numel // 2, numel - 1}:
        changed = tensor.clone()
        changed.view(torch.int16)[place] ^= 1
        assert fingerprint(changed) != before
    swapped = tensor.roll(numel // 2)
    assert (fingerprint(swapped) == before) == torch.equal(swapped, tensor)
    assert fingerprint(tensor.clone()) == before


@pytest.mark.parametrize("other", UNLIKE, ids=str)
def test_readable_only_if_equal(tmp_path: Path, other: Tensor) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([torch.nan, 0.0])}, file)
    assert readable("a", torch.tensor([1.0, 2.0]), {"a": file})
    assert readable("b", torch.tensor([torch.nan, 0.0]), {"b": file})
    assert not readable("b", torch.tensor([torch.nan, -0.0]), {"b": file})
    assert not readable("a", other, {"a": file})
    assert not readable("c", torch.tensor([1.0, 2.0]), {"a": file})


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_broken_file_is_not_readable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken").write_bytes(content)
    assert not readable("a", torch.ones(1), {"a": tmp_path / "broken"})
    assert not readable("a", torch.ones(1), {"a": tmp_path / "missing"})


@pytest.fixture
def dropped(tmp_path: Path) -> tuple[Originals, list[nn.Parameter], Path]:
    file = tmp_path / "model.safetensors"
    parameters = [parameter(1.0, 2.0), parameter(3.0, 4.0)]
    save_file({str(i): p.detach() for i, p in enumerate(parameters)}, file)
    originals = Originals()
    for i, p in enumerate(parameters):
        originals.drop(p, Source.of(p, file, str(i)))
    return originals, parameters, file


def test_dropped_and_read_back(dropped: tuple[Originals, list[nn.Parameter], Path]) -> None:
    originals, parameters, _ = dropped
    assert [p.numel() for p in parameters] == [0, 0]
    originals.restore()
    assert [p.tolist() for p in parameters] == [[1, 2], [3, 4]]
    originals.restore()
    assert [p.tolist() for p in parameters] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"0": torch.tensor([1.0, 2.0]), "1": torch.tensor([3.0, 5.0])}, "'1' in .* has changed since patch"),
        ({"0": torch.tensor([1.0, 2.0])}, "'1' cannot be read from"),
        (None, "'0' cannot be read from"),
    ],
)
def test_nothing_is_read_back_unless_all_can_be(
    dropped: tuple[Originals, list[nn.Parameter], Path], tensors: dict[str, Tensor] | None, text: str
) -> None:
    originals, parameters, file = dropped
    file.unlink()
    if tensors is not None:
        save_file(tensors, file)
    with pytest.raises(HfAccelError, match=f"cannot unpatch: {text}"):
        originals.restore()
    assert [p.numel() for p in parameters] == [0, 0]
    save_file({"0": torch.tensor([1.0, 2.0]), "1": torch.tensor([3.0, 4.0])}, file)
    originals.restore()
    assert [p.tolist() for p in parameters] == [[1, 2], [3, 4]]


def test_lost() -> None:
    kept, lost = parameter(1.0), parameter(2.0)
    originals = Originals()
    originals.lose(lost)
    assert (kept.numel(), lost.numel()) == (1, 0)
    with pytest.raises(UnsupportedError, match="1 original weights were dropped by keep_original=False"):
        originals.restore()


def test_read_back_in_the_dtype_it_was_loaded_in(tmp_path: Path) -> None:
    stored = torch.randn(5)
    save_file({"a": stored}, tmp_path / "model.safetensors")
    loaded = nn.Parameter(stored.bfloat16())
    originals = Originals()
    originals.drop(loaded, Source.of(loaded, tmp_path / "model.safetensors", "a"))
    originals.restore()
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded, stored.bfloat16())


def test_recover_says_what_is_gone(dropped: tuple[Originals, list[nn.Parameter], Path]) -> None:
    originals, parameters, file = dropped
    originals.lose(parameter(1.0))
    interrupted = KeyboardInterrupt()
    originals.recover(interrupted)
    assert [p.tolist() for p in parameters] == [[1, 2], [3, 4]]
    assert len(interrupted.__notes__) == 1
    assert "1 original weights, as keep_original=False asks for, and they are gone; load" in interrupted.__notes__[0]
    originals.drop(parameters[0], Source.of(parameters[0], file, "0"))
    file.unlink()
    originals.recover(interrupted)
    assert "1 original weights that patch() had freed cannot be read back, because '0'" in interrupted.__notes__[1]


def test_never_there() -> None:
    with pytest.raises(UnsupportedError, match="quantized and has no original weights; load a float one"):
        Originals(never_there=True).restore()


def test_parameter_bytes_counts_a_storage_once() -> None:
    table, other = torch.zeros(4, 2), torch.zeros(3, dtype=torch.bfloat16)
    assert parameter_bytes([table, table, other, torch.empty(0)]) == 4 * 2 * 4 + 3 * 2
