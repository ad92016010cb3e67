from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_accel.hardware.device import gpu_memory, host_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:   600 kB\nHugePages_Total: 0"
GROUP = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/"}


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, 0, (1_024_000, 614_400)),
        (512_000, 100_000, (512_000, 412_000)),
        (900_000, 100_000, (900_000, 614_400)),
        (512_000, 600_000, (512_000, 0)),
        (2_000_000, 0, (1_024_000, 614_400)),
    ],
)
def test_the_containers_limit_is_respected(make_root, limit, used, expected):
    group = {"memory.max": str(limit or "max"), "memory.current": str(used)}
    root = make_root({**GROUP, **{f"sys/fs/cgroup/{name}": text for name, text in group.items()}})
    assert host_memory(root) == expected


def test_without_proc_psutil_is_asked(make_root, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=9, available=4))
    assert host_memory(make_root({})) == (9, 4)


def test_gpu_memory_is_total_then_free(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (3, 7))  # torch says free first
    assert gpu_memory("cuda") == (7, 3)
