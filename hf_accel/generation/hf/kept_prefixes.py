"""Joins the pages of a session to a folder on the disk, as long as it is known which model computes them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from ...cache.block_folder import BlockFolder
from ...cache.hf.kept import KeptOnDisk
from ...cache.kept_blocks import GroupFolder, group_folders
from ...cache.pages import Pages
from ...errors import HfAccelWarning, UnsupportedError
from ...tensors import autocast_dtype, model_device
from ...undo.state import find_state, state_of
from .model_identity import ModelIdentity
from .model_runner import weights_salt


class KeptPrefixes:
    """The prompts of a session that stay on the disk.

    The weights are read in a thread of their own, again whenever the model is seen to have changed. Until that is done
    nothing is read or kept. first_pass: makes the pages of all layers, by a pass of one token.

    Raises UnsupportedError for pages that are not kept, and for a model of which no digest tells everything.
    """

    def __init__(self, model: nn.Module, pages: Pages, folder: BlockFolder, first_pass: Callable[[], None]) -> None:
        refusal = "its sequences share no beginnings" if pages.prefixes is None else processes_refusal(model)
        if refusal is not None:
            raise UnsupportedError(f"prompts cannot stay on the disk: {refusal}; leave directory= of the cache out")
        self.model, self.pages, self.folder, self._first_pass = model, pages, folder, first_pass
        self._salt: bytes | None = None
        self._reading: IdentityReading | None = None
        self._groups: list[GroupFolder] = []
        IdentityReading.identity_of(model)

    def look(self, salt: bytes) -> None:
        """Go on with what the model is by now. salt: of its weights, see ModelWatch."""
        if salt == self._salt:
            for group in self._groups:
                group.confirm()
            if self._reading is not None and self._reading.is_done:
                self._open()
            return
        for group in self._groups:
            group.drop()
        self._groups, self._salt = [], salt
        self._reading = IdentityReading(self.model, salt)

    def wait(self) -> None:
        """Wait until the weights are read, if they are not."""
        if self._reading is not None:
            self._reading.join()
            self._open()

    def _open(self) -> None:
        """Join the pages to their files; later, if a pass runs which has not made them all."""
        assert self._reading is not None
        if not all(group.storages for group in self.pages.groups):
            self._first_pass()
        identity, self._reading = self._reading.identity, None
        if identity is not None:
            self._groups = group_folders(self.pages, self.folder, identity)
            for files in self._groups:
                files.join()

    def close(self) -> None:
        """Wait until all that was confirmed is written."""
        for group in self._groups:
            group.drop()
        self.folder.flush()


class IdentityReading(threading.Thread):
    """Reads the weights of a model in a thread of its own, unless they were read already.

    salt: of the weights. identity: the digest; None if there is none.
    """

    def __init__(self, model: nn.Module, salt: bytes) -> None:
        super().__init__(name="hf_accel reads weights", daemon=True)
        self._state, self._salt = state_of(model).generation, salt
        known = self._state.identity
        self.identity = known[1] if known is not None and known[0] == salt else None
        try:
            self._model = None if self.identity is not None else self.identity_of(model)
        except UnsupportedError as error:  # of a model that has changed
            self._model = None
            warnings.warn(f"{error}, because the model was changed", HfAccelWarning, stacklevel=2)
        self.start()

    @staticmethod
    def identity_of(model: nn.Module) -> ModelIdentity:
        """Return what a model is. Raises UnsupportedError."""
        try:
            return ModelIdentity(model, state_of(model).config)
        except UnsupportedError as error:
            raise UnsupportedError(f"prompts cannot stay on the disk: {error}") from error

    @property
    def is_done(self) -> bool:
        return not self.is_alive()

    def run(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            self.identity = model.digest()
            self._state.identity = (self._salt, self.identity)


def processes_refusal(model: Any) -> str | None:
    """Return why what a model computes cannot stay on the disk, as one clause; None if it can."""
    state = state_of(model).generation
    if state.agreement.size > 1 or state.context is not None:
        return "several processes run this model"
    if autocast_dtype(model_device(model).type) is not None:
        return "torch.autocast is on"
    return None


def identify(model: nn.Module) -> tuple[bytes, str]:
    """Return the salt of a patched model's weights, and its digest. Raises UnsupportedError if there is none."""
    refusal = "the model is not patched; call hf_accel.patch(model) first" if find_state(model) is None else None
    refusal = refusal or processes_refusal(model)
    if refusal is not None:
        raise UnsupportedError(f"prompts cannot stay on the disk: {refusal}")
    return weights_salt(model), IdentityReading.identity_of(model).digest()


KeptOnDisk.identify = staticmethod(identify)
