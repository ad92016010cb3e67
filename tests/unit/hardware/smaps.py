"""What is in memory, by /proc/self/smaps: the code that is tested reads another file."""

from __future__ import annotations

from pathlib import Path

SMAPS = Path("/proc/self/smaps")


def resident_bytes(file: Path) -> int:
    """Of all mappings of a file in this process."""
    total, counting = 0, False
    for line in SMAPS.read_text().splitlines():
        first, *_, last = line.split()
        if not first.endswith(":"):  # "7f2e-7f2f r-xp ... file", before the fields of a mapping
            counting = last == str(file)
        elif first == "Rss:" and counting:
            total += int(line.split()[1]) * 1024
    return total
