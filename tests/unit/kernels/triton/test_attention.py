"""The attention kernel beyond the backends' own tests: its bytes, its machine code, and which rows round alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_accel.attention import TritonBackend
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged
from hf_accel.kernels.triton import attention as kernels
from hf_accel.kernels.triton.attention import Operands, attention, launches
from hf_accel.kernels.triton.launch import Launch

from ...attention.paging import make_case
from .bytes_moved import counted
from .compiling import compile_for
from .processes import compiled, interpreted

STORED = {"plain": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
EVERYTHING: dict[str, Any] = {"window": 100, "softcap": 2.0, "sinks": torch.empty(32)}
CAPABILITIES = [80, 89, 90]


# -- bytes ---------------------------------------------------------------------------------------------------


# With parts, which weigh the more the fewer bits K and V have.
MOST = {"plain": 1.05, "int8": 1.09, "fp8": 1.09, "int4": 1.16}


def bytes_of_parts(q: torch.Tensor, lengths: list[int]) -> int:
    """What a fixed split of keys moves on top: queries again, and results of parts, written and read in float32.

    Each part also has a logarithm, which is read twice.
    """
    parts = [-(-keys // kernels.SPLIT) for keys in lengths]
    row = q.shape[1] * q.shape[2]
    return sum(count * (row * 2 * 4 + q.shape[1] * 3 * 4) + (count - 1) * row * q.itemsize for count in parts)


def needed_bytes(q: torch.Tensor, kv: KV, keys: int) -> int:
    """Of queries, results, and the K and V (with scales) of `keys` tokens of each sequence, read once."""
    pages = [x for x in kv if x is not None]
    return q.nbytes * 2 + sum(x[0, :, 0].nbytes for x in pages) * keys


@interpreted
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("lengths", [[(1, 512)], [(1, 256), (1, 700)]], ids=str)
def test_decoding_moves_little_more_than_it_must(lengths: list[tuple[int, int]], stored: str) -> None:
    case = make_case(lengths, heads=(4, 1), dims=(128, 128), block_size=16, dtype=torch.bfloat16)
    if STORED[stored] is not None:
        case = case.quantized(STORED[stored])
    q, kv, ragged, options = case.operands()
    if kv.k_scales is not None and kv.v_scales is not None:
        kv = kv._replace(k_scales=kv.k_scales.bfloat16(), v_scales=kv.v_scales.bfloat16())
    with counted() as moved:
        attention(q, kv, ragged, options, return_lse=False)
    keys = [keys for _, keys in lengths]
    needed, parts = needed_bytes(q, kv, sum(keys)), bytes_of_parts(q, keys)
    bookkeeping = 4 * sum(-(-n // 16) for n in keys)  # block numbers
    programs = len(keys) * (q.shape[1] + -(-max(keys) // kernels.SPLIT))  # that look up where their sequence is
    assert moved.total == needed + parts + bookkeeping + programs * 12, moved.total / needed
    assert moved.total <= MOST[stored] * needed, moved.total / needed


# -- row invariance ------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(
    ("stored", "window"),
    [("int8", None), *(pytest.param(*each, marks=pytest.mark.long) for each in [("plain", None), ("int8", 40)])],
)
def test_a_query_has_the_same_bits_alone_and_among_others(stored: str, window: int | None) -> None:
    backend = TritonBackend(row_invariant=True)
    case = make_case([(17, 270), (1, 260), (5, 30)], window=window, dims=(16, 16), dtype=torch.bfloat16)
    case = case if STORED[stored] is None else case.quantized(STORED[stored])
    together = case.run(backend)
    row = 0
    for sequence, q in enumerate(case.q):
        for query in range(q.shape[1]):
            keys = case.k[sequence].shape[1] - q.shape[1] + query + 1
            if query % 7 == 0:
                alone = replace(
                    case, q=[q[:, query : query + 1]], k=[case.k[sequence][:, :keys]], v=[case.v[sequence][:, :keys]],
                    block_table=case.block_table[sequence : sequence + 1],
                )  # fmt: skip
                assert torch.equal(alone.run(backend)[0], together[row + query]), (sequence, query)
        row += q.shape[1]


def test_a_launch_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins: a tensor that says that it is on the second GPU, and a kernel that notes the current one."""
    current = [0]

    class Elsewhere(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]
        device = torch.device("cuda", 1)  # type: ignore[assignment]

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    seen: list[int] = []

    class Kernel(dict[Any, Any]):
        arg_names = ("n", "x")

    kernel = Kernel({(2,): lambda **_: seen.append(current[-1])})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", guard)
    tensors = [torch.empty(1).as_subclass(Elsewhere), torch.empty(1)]
    for tensor in tensors:
        Launch(kernel=kernel, grid=(2,), arguments={"n": 3, "x": tensor}).run()
    Launch(kernel=kernel, grid=(2, 0), arguments={"x": tensors[0]}).run()
    assert seen == [1, 0]


# -- machine code --------------------------------------------------------------------------------------------


def operands(dtype: torch.dtype, dim: int, stored: str, *, queries: int = 1, **options: Any) -> Operands:
    """4 sequences of 1,024 keys, whose numbers are never read."""
    quantized = STORED[stored]
    columns = dim // 2 if stored == "int4" else dim
    pages = torch.empty(256, 8, 16, columns, dtype=quantized or dtype)
    scales = None if quantized is None else torch.empty((256, 8, 16, 2)[: 4 if stored == "int4" else 3], dtype=dtype)
    q = torch.empty(4 * queries, 32, dim, dtype=dtype)
    ragged = Ragged(
        torch.arange(5, dtype=torch.int32) * queries, torch.full((4,), 1024, dtype=torch.int32), queries, 1024,
        torch.zeros(4, 64, dtype=torch.int32),
    )  # fmt: skip
    given = AttentionOptions(dim**-0.5, **options)
    lse = torch.empty(4 * queries, 32) if options else None
    return Operands(q=q, kv=KV(pages, pages, scales, scales), ragged=ragged, options=given, out=q, lse=lse)


def every_launch(dtype: torch.dtype, dim: int, stored: str, **options: Any) -> Iterator[Launch]:
    """Decoding, the merge of its parts, and a prompt."""
    found = launches(operands(dtype, dim, stored, queries=64, **options))
    assert [launch.kernel for launch in found] == [kernels.attend, kernels.merge, kernels.attend]
    yield from found


@pytest.mark.covering(1)
@compiled
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("stored", STORED)
def test_machine_code_fits(stored: str, capability: int) -> None:
    for launch in every_launch(torch.bfloat16, 128, stored):
        compile_for(launch, capability).assert_fits(capability)


@compiled
@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "dim", "everything"),
    [
        *((dtype, dim, False) for dtype in (torch.bfloat16, torch.float32) for dim in (64, 128, 256)),
        (torch.float16, 128, False),
        (torch.bfloat16, 80, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("stored", STORED)
def test_every_machine_code_fits(dtype: torch.dtype, dim: int, stored: str, everything: bool) -> None:
    options = EVERYTHING if everything else {}
    for capability in CAPABILITIES:
        for launch in every_launch(dtype, dim, stored, **options):
            compile_for(launch, capability).assert_fits(capability)
