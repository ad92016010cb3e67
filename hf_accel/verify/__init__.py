"""Does a patched model write what its reference writes, and what do its quantized weights cost?"""

from .certificate import Certificate, Cost, Verdict
from .verify import verify

__all__ = ["Certificate", "Cost", "Verdict", "verify"]
