"""The memory of a layer whose steps can be taken back: by `crop`, and after a forward that stopped."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from h2o_kv.hf.budgets import MovableBudget
from h2o_kv.hf.journal import Journal
from h2o_kv.hf.progress import Progress, StepRoom
from h2o_kv.hf.settings import Settings

__all__ = ["RollbackMemory"]

# Tokens that can be taken back where nobody has said how many: transformers drafts 20 at most, unless
# it is told otherwise.
_MAX_ROLLBACK = 32


class RollbackMemory(MovableBudget):
    """The tensors of one decoder layer, and what takes its latest tokens back."""

    def __init__(self, settings: Settings, progress: Progress, layer_idx: int) -> None:
        super().__init__(settings, layer_idx)
        self._progress = progress
        self.step_room: StepRoom | None = None
        self._record_from_the_start()

    # ---- A forward that stopped.

    def settle(self) -> None:
        """Become what this layer was before a forward that stopped half-way, if there is one.

        Not while a forward is under way.
        """
        undo = self._progress.undo.get(self.layer_idx)
        if undo is None:
            return
        self.__dict__.update(undo.attributes)
        if self.keys is not None:
            with torch.inference_mode(False), torch.no_grad():
                if self.columns_seen == 0:
                    self._empty(slice(None))
                elif undo.saved is not None:
                    undo.saved.restore(self.step_state())
        del self._progress.undo[self.layer_idx]

    def last_complete(self) -> RollbackMemory:
        """Return the layer with the attributes that the last complete forward left."""
        undo = self._progress.undo.get(self.layer_idx)
        if undo is None:
            return self
        layer = copy.copy(self)
        layer.__dict__.update(undo.attributes)
        return layer

    def complete(self, name: str) -> Tensor | None:
        """`scores`, `positions` or `tokens_seen` as the last complete forward left it, to be read."""
        undo = self._progress.undo.get(self.layer_idx)
        saved = None if undo is None else undo.saved
        tensor: Tensor | None = getattr(self if saved is None else saved.before, name)
        if undo is None or saved is not None or undo.attributes["columns_seen"] > 0:
            return tensor
        attributes = undo.attributes
        empty: Tensor | None = attributes.get(f"_{name}", attributes.get(name))
        return None if empty is None else torch.full_like(empty, -1 if name == "positions" else 0)

    # ---- Recording.

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back: while forwards are recorded."""
        return self.journal is not None

    @property
    def record_past(self) -> bool:
        """Name by which transformers 5 asks whether forwards are recorded, and says so."""
        return self.journal is not None

    @record_past.setter
    def record_past(self, record: bool) -> None:
        if record:
            self.activate_past_recording()
        else:
            self.settle()
            self.journal = None

    def activate_past_recording(self) -> None:
        """Record forwards from now on, so that `crop` can undo them.

        Raises
        ------
        ValueError
            max_rollback is 0.
        """
        self.settle()
        if self.journal is not None:
            return
        depth = self.settings.max_rollback
        if depth == 0:
            raise ValueError(
                "H2OCache: max_rollback must be >= 1 for assisted decoding and prompt lookup, got 0; "
                "make the cache with max_rollback = the number of drafts of a forward"
            )
        self.journal = Journal(_MAX_ROLLBACK if depth is None else depth)
        self._in_prompt = self.columns_seen == 0  # What was seen before is the prompt.

    def _record_from_the_start(self) -> None:
        self.journal = None
        if self.settings.max_rollback:
            self.activate_past_recording()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` could not do; changes nothing.

        Raises
        ------
        RuntimeError
            Nothing is recorded.
        ValueError
            More tokens would be removed than are recorded, or the last forward had too many to be
            recorded.
        """
        remove, journal = self._removed_by(tokens_to_remove), self.journal
        if journal is None:
            if remove > 0:
                raise RuntimeError(
                    f"H2OCache.crop: {remove} of {self.columns_seen} tokens cannot be removed, since "
                    "nothing is recorded; make the cache with max_rollback = the number of drafts of "
                    "a forward, or call activate_past_recording() before the forward"
                )
            return
        if journal.unverified:
            raise ValueError(
                f"H2OCache.crop: a forward to be verified must have at most max_rollback + 1 = "
                f"{journal.depth + 1} tokens, got {journal.unverified}; they joined as a prompt "
                "does. Draft fewer, or make the cache with a larger max_rollback"
            )
        if remove > min(journal.depth, journal.num_columns):
            raise ValueError(
                "H2OCache.crop: tokens to remove must be <= max_rollback and among those recorded "
                f"since the prompt, got {remove} with max_rollback={journal.depth} and "
                f"{journal.num_columns} recorded"
            )

    def _removed_by(self, tokens_to_remove: int) -> int:
        """How many tokens `crop` is to remove; 0 or less for none."""
        if tokens_to_remove > 0:
            return self.columns_seen - int(tokens_to_remove)
        return -int(tokens_to_remove)
