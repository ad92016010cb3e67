"""Memory of devices by their name, and sizes as people write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import UnsupportedError

# GB as their makers' data sheets and product pages give them (NVIDIA: V100, P100, T4, A10, A30, A40, A100, L4, L40,
# L40S, H100, H200, GH200, B200, RTX PRO 6000, RTX A6000, RTX 6000 Ada, GeForce 30, 40 and 50; AMD: Instinct). A device
# reports about as many decimal GB, or some more. Several numbers: sold with each of them.
MEMORY_GB: dict[str, tuple[int, ...]] = {
    "P100": (12, 16),
    "V100": (16, 32),
    "T4": (16,),
    "A10": (24,),
    "A10G": (24,),
    "A30": (24,),
    "A40": (48,),
    "A100": (40, 80),
    "L4": (24,),
    "L40": (48,),
    "L40S": (48,),
    "H100": (80, 94),
    "H200": (141,),
    "GH200": (96, 144),
    "B200": (180,),
    "RTX 3060": (8, 12),
    "RTX 3070": (8,),
    "RTX 3080": (10, 12),
    "RTX 3080 Ti": (12,),
    "RTX 3090": (24,),
    "RTX 3090 Ti": (24,),
    "RTX 4060": (8,),
    "RTX 4060 Ti": (8, 16),
    "RTX 4070": (12,),
    "RTX 4070 Ti": (12,),
    "RTX 4070 Ti SUPER": (16,),
    "RTX 4080": (16,),
    "RTX 4080 SUPER": (16,),
    "RTX 4090": (24,),
    "RTX 5060 Ti": (8, 16),
    "RTX 5070": (12,),
    "RTX 5070 Ti": (16,),
    "RTX 5080": (16,),
    "RTX 5090": (32,),
    "RTX A6000": (48,),
    "RTX 6000 Ada": (48,),
    "RTX PRO 6000": (96,),
    "MI210": (64,),
    "MI300X": (192,),
    "MI325X": (256,),
}
# GB/s of memory, and TFLOP/s of dense products of 16-bit numbers and of float8_e4m3fn, summed in float32, as the
# makers' data sheets give them: no program reaches them, and none of ours was measured on these devices. Of several
# models of one name, the slower memory. FP8 is half of what the sheets of the H100 PCIe (3,026), H200 (3,958) and L4
# (485) give with sparsity, what that of the L40S gives without, and for the RTX 4090 Appendix A of the Ada GPU
# Architecture whitepaper (from v2.02 on, which corrects it). AMD's MI300X multiplies another FP8, to which
# nothing here is rounded.
SPEEDS: dict[str, tuple[float, float, float | None]] = {
    "V100": (900, 125, None),
    "T4": (320, 65, None),
    "A10": (600, 125, None),
    "A30": (933, 165, None),
    "A100": (1555, 312, None),
    "L4": (300, 121, 242),
    "L40S": (864, 362, 733),
    "H100": (2039, 756, 1513),
    "H200": (4800, 989, 1979),
    "RTX 3090": (936, 71, None),
    "RTX 4090": (1008, 165, 330),
    "MI300X": (5300, 1307, None),
}
UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b", re.IGNORECASE)
NO_PART_OF_A_NAME = re.compile(r"nvidia|geforce|tesla|amd|instinct|sxm\d?|pcie|hbm\d?e?|oam", re.IGNORECASE)


class Speed(NamedTuple):
    """Bytes and operations a second; fp8: operations on FP8 inputs, None where there are no such instructions."""

    bandwidth: float
    compute: float
    fp8: float | None


def memory_of(name: str) -> float:
    """Return the bytes of "24GB", "16 GiB", or of a device such as "L4", "RTX 4090" or "A100 80GB".

    A device that is sold with several sizes has the smallest, unless the name says which. Raises UnsupportedError for
    a name that is not known, and for a size that the device is not sold with.
    """
    size = SIZE.fullmatch(name.strip())
    if size is not None:
        return _bytes(size)
    said = SIZE.search(name)
    found = _known(name, MEMORY_GB)
    if found is None:
        raise UnsupportedError(f"the memory of {name!r} is not known; {_nearest(name)}")
    sizes = MEMORY_GB[found]
    if said is None:
        return min(sizes) * 1e9
    if float(said[1]) not in sizes or said[2].lower() != "g":
        known = " or ".join(f"{size} GB" for size in sizes)
        raise UnsupportedError(f"{name!r}: the {found} is sold with {known}; give one of these, or a size alone")
    return float(said[1]) * 1e9


def speed_of(name: str) -> Speed:
    """Return the speed of a device from its data sheet. Raises UnsupportedError for a name that is not in SPEEDS."""
    found = _known(name, SPEEDS)
    if found is None:
        raise UnsupportedError(
            f"the speed of {name!r} is not known; give bandwidth= and compute=, or one of {', '.join(SPEEDS)}"
        )
    bandwidth, compute, fp8 = SPEEDS[found]
    return Speed(bandwidth * 1e9, compute * 1e12, fp8 and fp8 * 1e12)


def _bytes(size: re.Match[str]) -> float:
    return float(size[1]) * (1024 if size[3] else 1000) ** UNITS[size[2].lower()]


def _known(name: str, devices: Iterable[str]) -> str | None:
    """Find the device that a name means, whatever else its seller writes."""
    return next((known for known in devices if _plain(known) == _plain(name)), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", NO_PART_OF_A_NAME.sub("", SIZE.sub("", name)).lower())


def _nearest(name: str) -> str:
    names = {_plain(known): known for known in MEMORY_GB}
    close = difflib.get_close_matches(_plain(name), names, n=1)
    hint = f"did you mean {names[close[0]]!r}? Or give" if close else "give"
    return f"{hint} its size, such as '24GB', a number of bytes, or a device of this machine: 'cpu', 'cuda'"
