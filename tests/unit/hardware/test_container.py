from __future__ import annotations

import pytest

from hf_accel.hardware.device import control_groups, cpu_quotas, memory_limits

UNLIMITED_V1 = str(2**63 - 4096)

VERSION_2 = {
    "proc/self/cgroup": "0::/pod/box",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
    "sys/fs/cgroup/pod/cpu.max": "150000 100000",
    "sys/fs/cgroup/pod/box/memory.max": "4000",
    "sys/fs/cgroup/pod/box/memory.current": "1500",
    "sys/fs/cgroup/pod/box/memory.stat": "anon 900\ninactive_file 600",
    "sys/fs/cgroup/pod/memory.max": "max",
}
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n2:cpuset:/\n1:name=systemd:/box",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "8000",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "3000",
    "sys/fs/cgroup/memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 1000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000",
}


@pytest.mark.parametrize(
    ("files", "quotas", "limits"),
    [
        pytest.param(VERSION_2, [1.5], [(4000, 900)], id="version 2, limits at different depths"),
        pytest.param(VERSION_1, [3.0], [(8000, 2000), (int(UNLIMITED_V1), 5000)], id="version 1"),
        pytest.param({}, [], [], id="no control groups"),
        pytest.param({"proc/self/cgroup": "0::/"}, [], [], id="no files"),
        pytest.param(
            {"proc/self/cgroup": "0::/host/path", "sys/fs/cgroup/cpu.max": "50000 100000"},
            [0.5],
            [],
            id="the host's path, the limit at the mount",
        ),
    ],
)
def test_limits(make_root, files, quotas, limits):
    root = make_root(files)
    assert list(cpu_quotas(root)) == quotas
    assert list(memory_limits(root)) == limits


def test_a_group_is_followed_by_its_parents_up_to_the_mount(make_root):
    root = make_root({"proc/self/cgroup": "3:cpu,cpuacct:/a/b"})
    mount = root / "sys/fs/cgroup/cpu"
    assert list(control_groups("cpu", root)) == [mount / "a/b", mount / "a", mount]
    assert list(control_groups("memory", root)) == []
