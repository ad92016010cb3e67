from __future__ import annotations

import os

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.hardware import cpu_model, device, isa_levels

AVX2 = frozenset({"avx2", "fma3", "sse4_2"})
AVX_VNNI = AVX2 | {"avx_vnni"}
AVX512 = AVX2 | {"avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni", "avx512_bf16"}
AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (AVX512 | AMX, "amx"),
        (AVX512 | AMX - {"amx_bf16"}, "avx512_vnni_bf16"),
        (AVX512, "avx512_vnni_bf16"),
        (AVX512 - {"avx512_bf16"}, "avx512_vnni"),
        (AVX512 | {isa_levels.SLOW_PAIRS}, "avx512_vnni"),
        (AVX512 | AMX | {isa_levels.SLOW_PAIRS}, "amx"),
        (AVX512 - {"avx512_dq"}, "avx2"),
        (AVX512 | AVX_VNNI, "avx512_vnni_bf16"),
        (AVX_VNNI, "avx_vnni"),
        (AVX2, "avx2"),
        (AVX2 - {"fma3"}, "portable"),
        (frozenset({"neon", "dot", "i8mm", "bf16", "sve"}), "neon_i8mm"),
        (frozenset({"neon", "dot"}), "neon_dotprod"),
        (frozenset({"neon", "i8mm"}), "neon"),
        (frozenset({"dot"}), "portable"),
    ],
)
def test_the_best_level_is_chosen(features, level):
    assert isa_levels.choose_isa(features) == level
    assert isa_levels.choose_isa(features, requested="") == level


@pytest.mark.parametrize("requested", ["avx512_vnni_bf16", "avx_vnni", "avx2", "portable"])
def test_a_slower_level_may_be_requested(requested):
    features = AVX512 | AVX_VNNI | {isa_levels.SLOW_PAIRS}
    assert isa_levels.choose_isa(features, requested=requested) == requested


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            "sse9",
            f"HF_ACCEL_ISA='sse9' is not known; choose one of {', '.join(isa_levels.ISA_LEVELS)}",
        ),
        ("avx_vnni", "HF_ACCEL_ISA='avx_vnni' is not in this CPU; choose one of avx2, portable, avx2_tiles"),
    ],
)
def test_a_level_that_cannot_run_is_an_error(requested, message):
    with pytest.raises(UnsupportedError) as error:
        isa_levels.choose_isa(AVX2, requested=requested)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("capability", "level"), [("AVX512", "avx2"), ("AVX2", "avx2"), ("DEFAULT", "portable"), ("NO AVX", "portable")]
)
def test_without_a_list_of_features_torchs_own_level_counts(monkeypatch, capability, level):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert isa_levels.choose_isa(device.instruction_sets.__wrapped__()) == level


@pytest.mark.parametrize(
    ("machine", "features", "level"),
    [
        ("aarch64", "fp asimd evtstrm crc32 asimddp sve i8mm", "neon_i8mm"),  # as on Graviton 3
        ("aarch64", "fp asimd aes asimddp", "neon_dotprod"),
        ("aarch64", "fp asimd evtstrm", "neon"),
        ("arm64", None, "neon"),  # macOS has no such file
        ("x86_64", "asimd asimddp", "portable"),
        ("riscv64", None, "portable"),
    ],
)
def test_without_a_list_of_features_arm_has_neon_and_what_linux_lists(
    monkeypatch, make_root, machine, features, level
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "arm64"})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(device.platform, "machine", lambda: machine)
    cpuinfo = f"processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: {features}\nCPU implementer\t: 0x41"
    root = make_root({} if features is None else {"proc/cpuinfo": cpuinfo})
    assert isa_levels.choose_isa(device.instruction_sets.__wrapped__(root)) == level


@pytest.mark.parametrize(
    ("name", "others", "slow", "faster"),
    [("Intel Xeon", {}, True, False), ("Intel Xeon", {"amx_bf16": True}, True, True), ("AMD EPYC", {}, False, True)],
)
def test_intel_adds_pairs_of_bfloat16_slowly(monkeypatch, name, others, slow, faster):
    listed = {"avx512_bf16": True, "cpu_name": name, **others}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: listed, raising=False)
    monkeypatch.setattr(device, "cpu_name", device.cpu_name.__wrapped__)
    monkeypatch.setattr(device, "instruction_sets", device.instruction_sets.__wrapped__)
    assert (isa_levels.SLOW_PAIRS in device.instruction_sets()) == slow
    assert device.bfloat16_is_faster() == faster
    listed["avx512_bf16"] = False
    assert isa_levels.SLOW_PAIRS not in device.instruction_sets()


def test_features_are_the_true_ones(monkeypatch):
    listed = {"avx2": True, "amx_int8": False, "l2_cache_size": 1, "cpu_name": "Some CPU", "num_physical_cores": 3}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: listed, raising=False)
    assert device.instruction_sets.__wrapped__() == {"avx2"}
    assert device.cpu_name.__wrapped__() == "Some CPU"
    assert device.physical_cores.__wrapped__() == 3


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [(8, "max", 8), (8, "250000", 2), (8, "50000", 1), (2, "400000", 2), (None, "max", 6)],
)
def test_affinity_and_quota_limit_the_cores(monkeypatch, make_root, affinity, quota, cores):
    if affinity is None:  # as on macOS and Windows
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    root = make_root({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    assert device.usable_cores(root) == cores


def cache(core: int, index: int, *, level: int, size: str, shared: str) -> dict[str, str]:
    directory = f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
    return {f"{directory}/level": str(level), f"{directory}/size": size, f"{directory}/shared_cpu_list": shared}


def test_level_2_is_of_one_core_and_level_3_of_all(make_root):
    files: dict[str, str] = {}
    for core in range(4):
        files |= cache(core, 0, level=1, size="32K", shared=str(core))
        files |= cache(core, 2, level=2, size="1024K", shared=str(core))
        files |= cache(core, 3, level=3, size="8192K", shared="0-1" if core < 2 else "2-3")
    root = make_root(files)
    assert device.cache_bytes(2, root) == 2**20
    assert device.cache_bytes(3, root) == 2 * 8 * 2**20


def test_without_sysfs_torch_is_asked_for_the_caches(monkeypatch, make_root):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"l2_cache_size": 5}, raising=False)
    root = make_root({})
    assert device.cache_bytes(2, root) == 5
    assert device.cache_bytes(3, root) is None


@pytest.mark.parametrize(
    "cpuinfo, numbers",
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t: 17\nmodel name\t: EPYC\n", ("AuthenticAMD", 25, 17)),
        ("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\n", ("GenuineIntel", 6, 143)),
        ("CPU implementer\t: 0x41", None),
        ("vendor_id : Other\ncpu family : unknown\nmodel : 1\n", None),
        (None, None),
    ],
)  # fmt: skip
def test_numbers_tell_cpus_of_one_name_apart(make_root, cpuinfo, numbers):
    root = make_root({} if cpuinfo is None else {"proc/cpuinfo": cpuinfo})
    assert cpu_model.cpu_numbers(root) == numbers
