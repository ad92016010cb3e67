"""Limits that a container sets through control groups, version 1 and 2 (man 7 cgroups)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_quotas(root: Path = ROOT) -> Iterator[float]:
    """Return the cores that each control group around this process grants, where it limits them."""
    for directory in control_groups("cpu", root):
        quota, period = (content_of(directory / "cpu.max") or "max 0").split()  # version 2
        if quota == "max":
            quota = content_of(directory / "cpu.cfs_quota_us") or "-1"  # version 1
            period = content_of(directory / "cpu.cfs_period_us") or "0"
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def memory_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Return (limit, used) in bytes of each control group around this process that has a limit."""
    for directory in control_groups("memory", root):
        for limit_file, used_file, cache_field in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
        ):
            limit = content_of(directory / limit_file) or "max"
            if limit != "max":
                statistic = dict(line.split() for line in (content_of(directory / "memory.stat") or "").splitlines())
                yield int(limit), int(content_of(directory / used_file) or 0) - int(statistic.get(cache_field, 0))


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Return the directories of this process's control groups for `controller`, each followed by its parents.

    Format: /proc/self/cgroup holds "id:controllers:path" lines, with no controllers for version 2 (man 7 cgroups).
    """
    base = root / "sys/fs/cgroup"
    for line in (content_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controller if controllers else base
        # Inside a container the path may be the host's and not exist; the mount itself then holds the limits.
        directory = mount / path.lstrip("/")
        yield from (parent for parent in (directory, *directory.parents) if parent.is_relative_to(mount))


def content_of(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
