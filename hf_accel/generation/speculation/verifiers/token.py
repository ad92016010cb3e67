"""Verification token by token (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318)."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from .rejection import Drawn, DrawnDrafts, RejectionVerifier


class TokenVerifier(RejectionVerifier):
    """Accepts a drafted token x with probability min(1, p(x) / q(x)). The first rejected token ends the draft."""

    name = "token"

    def accept(self, drawn: abc.Sequence[Drawn]) -> list[tuple[int, float]]:
        return [(num_accepted(draft), 1.0) for draft in drawn]

    def accept_on_device(self, drafts: DrawnDrafts) -> tuple[Tensor, Tensor]:
        stays = drafts.uniforms * drafts.q_drafted < drafts.p_drafted
        return stays.long().cumprod(1).sum(1), torch.ones_like(drafts.uniforms[:, 0])


def num_accepted(draft: Drawn) -> int:
    count = 0
    for p, q, u in zip(draft.p_drafted, draft.q_drafted, draft.uniforms, strict=True):
        if not u * q < p:  # not <=, because u may be 0, and a token of probability 0 must be rejected
            break
        count += 1
    return count
