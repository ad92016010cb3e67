"""Verification of drafts: by token, by block, or with shared random numbers."""

from ....errors import UnsupportedError
from .block import BlockVerifier
from .seeded import SeededVerifier
from .token import TokenVerifier
from .verifier import Place, Verifier

VERIFIERS: dict[str, type[Verifier]] = {kind.name: kind for kind in (TokenVerifier, BlockVerifier, SeededVerifier)}


def verifier(name: str) -> Verifier:
    """A Verifier by its name. Raises UnsupportedError for one that is not known."""
    if name not in VERIFIERS:
        raise UnsupportedError(f"verify={name!r} is not known; choose one of {', '.join(map(repr, VERIFIERS))}")
    return VERIFIERS[name]()


__all__ = ["VERIFIERS", "BlockVerifier", "Place", "SeededVerifier", "TokenVerifier", "Verifier", "verifier"]
