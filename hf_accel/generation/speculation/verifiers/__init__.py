"""Verification of drafts token by token, as a block, or with shared random numbers."""

from ....errors import UnsupportedError
from .block import BlockVerifier
from .rejection import TokenVerifier
from .seeded import SeededVerifier
from .verifier import Place, Verifier

VERIFIERS: dict[str, type[Verifier]] = {kind.name: kind for kind in (TokenVerifier, BlockVerifier, SeededVerifier)}


def verifier(name: str) -> Verifier:
    """Make the Verifier of this name. Raises UnsupportedError for an unknown name."""
    if name not in VERIFIERS:
        raise UnsupportedError(f"verify={name!r} is not known; choose one of {', '.join(map(repr, VERIFIERS))}")
    return VERIFIERS[name]()


__all__ = ["VERIFIERS", "BlockVerifier", "Place", "SeededVerifier", "TokenVerifier", "Verifier", "verifier"]
