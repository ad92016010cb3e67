"""What FlashAttention is asked for: stand-ins with the libraries' signatures compute it by its documentation."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.attention import AttentionSpec, choose_backend, flash
from hf_accel.attention.flash import FlashAttention2, FlashAttention3, FlashBackend, FlashLibrary, TorchVarlen
from hf_accel.errors import UnsupportedError
from hf_accel.kernels import triton as kernels

from .oracle import assert_close, oracle
from .paging import make_case

SPEC = AttentionSpec(
    dtype=torch.bfloat16, device_type="cuda", head_dim=64, value_dim=64, num_heads=4, num_kv_heads=2
)  # fmt: skip


@dataclass
class Standin:
    """FlashAttention in float64. calls: how often it was asked."""

    calls: int = 0

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        self.calls += 1
        left, right = window_size
        options = {"scale": softmax_scale, "causal": causal or right == 0, "softcap": softcap or None}
        out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
        for sequence in range(len(cu_seqlens_q) - 1):
            rows = slice(int(cu_seqlens_q[sequence]), int(cu_seqlens_q[sequence + 1]))
            keys = slice(int(cu_seqlens_k[sequence]), int(cu_seqlens_k[sequence + 1]))
            assert rows.stop - rows.start <= max_seqlen_q and keys.stop - keys.start <= max_seqlen_k
            if block_table is None:
                own = [x[keys] for x in (k, v)]
            else:
                size, length = k.shape[1], keys.stop - keys.start
                used = block_table[sequence, : -(-length // size)].long()
                own = [x[used].flatten(0, 1)[:length] for x in (k, v)]
            states = [x.transpose(0, 1)[None] for x in (q[rows], *own)]
            out[rows] = oracle(*states, **options, window=None if left < 0 else left + 1)[0][0]  # type: ignore[arg-type]
        return out.to(q.dtype)

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, page_table: Tensor,
        cu_seqlens_q: Tensor, max_seqlen_q: int, **options: Any,
    ) -> Tensor:  # fmt: skip
        cu_k = torch.cat([torch.zeros(1, dtype=torch.int32), cache_seqlens.cumsum(0).int()])
        return self.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q, cu_k, max_seqlen_q, int(cache_seqlens.max()), block_table=page_table,
            **options,
        )  # fmt: skip

    def varlen_attn(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
        seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert enable_gqa is (query.shape[1] != key.shape[-2])
        assert (seqused_k is None) is (block_table is None)
        return self.flash_attn_varlen_func(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, softmax_scale=scale, window_size=window_size,
            block_table=block_table,
        )  # fmt: skip


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    standin = Standin()
    functions = {name: getattr(standin, name) for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache")}
    for name in ("flash_attn", "flash_attn_interface"):
        spec = SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__="2.8.3", __spec__=spec, **functions))
    monkeypatch.setattr(flash.varlen, "varlen_attn", standin.varlen_attn)
    monkeypatch.setattr(kernels, "_gpu_refusal", lambda: None)
    monkeypatch.setattr(kernels, "capability", lambda: (9, 0))
    return standin


LIBRARIES = {"flash_attn": FlashAttention2(), "flash_attn 3": FlashAttention3(), "varlen": TorchVarlen()}
each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def backend(library: FlashLibrary) -> FlashBackend:
    """Its pages are read on the CPU here, where Triton is not: what FlashAttention does not read must not be asked."""
    made = FlashBackend("flash", library)
    made.triton = made.torch  # type: ignore[assignment]
    return made


@each_library
@pytest.mark.parametrize("extra", [{}, {"window": 9}, {"softcap": 2.0}], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("block_size", [16, 256])
def test_pages_and_prompts(standin: Standin, library: FlashLibrary, block_size: int, extra: dict[str, Any]) -> None:
    if extra.get("softcap") and not library.has_softcap:
        pytest.skip("its backend refuses to bound scores")
    case = make_case([(1, 40), (33, 33), (17, 300)], block_size=block_size)
    assert_close(case.run(backend(library), **extra), case.expected(**extra)[0])
    assert standin.calls == (1 if library.reads(block_size) else 0)
    _, _, ragged, options = case.operands(**extra)
    q, k, v = (torch.cat([x.transpose(0, 1) for x in xs]) for xs in (case.q, case.k, case.v))
    out = backend(library).packed(q, flash.KV(k, v), ragged, options)
    assert_close(out, case.expected(**extra)[0])
    assert standin.calls == (2 if library.reads(block_size) else 1)


@each_library
def test_bits_and_lse_are_left_to_our_kernel(standin: Standin, library: FlashLibrary) -> None:
    case = make_case([(1, 40), (2, 300)], block_size=256)
    out, lse = case.run(backend(library), return_lse=True)
    assert_close(out, case.expected()[0])
    assert_close(lse, case.expected()[1])
    quantized = case.quantized(torch.int8)
    assert_close(quantized.run(backend(library)), quantized.expected()[0])
    assert standin.calls == 0


def test_which_blocks_are_read(standin: Standin) -> None:
    read = {name: [library.reads(size) for size in (16, 256, 512)] for name, library in LIBRARIES.items()}
    large = [False, True, True]
    assert read == {"flash_attn": large, "flash_attn 3": [True, True, True], "varlen": large}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flash_attn", {"dtype": torch.float32}, "it computes in bfloat16 and float16, not in float32"),
        ("flash_attn", {"sinks": True}, "it has no attention sinks"),
        ("flash_attn", {"value_dim": 32}, "as many of K as of V"),
        ("flash_attn", {"head_dim": 60, "value_dim": 60}, "multiple of 8"),
        ("varlen", {"softcap": 30.0}, "it does not bound scores"),
    ],
    ids=str,
)
def test_refusals(standin: Standin, name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        choose_backend(replace(SPEC, **changes), name)


def test_the_order_of_choice(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(SPEC)[0].name == "flash_attn"
    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: None)
    chosen, refusals = choose_backend(SPEC)
    assert chosen.name == "varlen"
    assert refusals == [("flash_attn", "flash_attn is not installed")]
    assert choose_backend(SPEC, row_invariant=True)[0].name == "triton"
