"""One decoder layer's share of an H2OCache: its four tensors, and the step on them.

transformers hands a cache only the new keys and values, never the query, so `update` stores
nothing: it puts the layer on the key tensor and returns it, the attention function "h2o"
(attention.py) finds the layer there, and `H2OLayer.attend` does the whole step in one call of
h2o_attention_decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_kv.hf.journal import Before, Entry, Forward, Journal, TakenBack
from h2o_kv.hf.masks import real_tokens
from h2o_kv.hf.memory import Variable
from h2o_kv.hf.progress import Copies, Progress, Room, StepRoom, Undo
from h2o_kv.hf.rollback import RollbackMemory
from h2o_kv.hf.rolling import ranks_needed
from h2o_kv.hf.settings import Settings, model_shape
from h2o_kv.policies import rules_of

__all__ = ["LAYER_ATTRIBUTE", "H2OLayer"]

# Attribute of the key tensor by which the attention function finds its layer: the one channel that
# every supported release and model family leaves open, and that is safe between threads.
LAYER_ATTRIBUTE = "_h2o_layer"
# The one overload, found once.
_attention_decode = torch.ops.h2o.h2o_attention_decode.default


class _NewTokens(NamedTuple):
    """What a forward brings, in the dtype of the cache."""

    query: Tensor  # [batch, num_q_heads, num_new, head_dim]
    key: Tensor  # [batch, num_kv_heads, num_new, head_dim], and so is value
    value: Tensor
    position: Tensor  # int32, [batch, num_new]; -1 = padding
    added: Tensor | int  # how many of each row are real
    scale: float | None


class H2OLayer(RollbackMemory):
    """State of one decoder layer.

    The tensors are allocated at the first forward, on the device of its keys, and written in place
    by the operator. They are None before that.

    Attributes
    ----------
    k_cache, v_cache : Tensor, [batch, num_kv_heads, capacity, head_dim]
        What each slot holds; the same tensors as `keys` and `values`.
    scores : Tensor, float32 (float64 for float64 caches), [batch, num_kv_heads, capacity]
        Attention mass that each slot's token received so far.
    positions : Tensor, int32, [batch, num_kv_heads, capacity]
        Which token each slot holds, counted in the real tokens of its row; -1 = empty.
    tokens_seen : Tensor, int32, [batch]
        Real tokens of each row so far: the position of its next token.
    columns_seen : int
        Columns of input_ids so far, padding included: what `get_seq_length` answers.
    budget : Budget or None
        Budget of every row, or the largest one where they differ; its total is the capacity. While
        budgets move, what they move to.
    row_budget : Tensor, int32, [batch, 3], or None
        (num_sink, num_heavy, num_recent) of each row where they differ; while budgets move, those in
        force.
    row_target : Tensor, int32, [batch, 4], or None
        While budgets move: those that each row moves to, and by how many tokens in a step.
    held_at : int or None
        Columns seen when the budget that was set last held in every row.
    last_evicted : Tensor, int32, [batch, num_kv_heads, num_new], or None
        Positions that left in the last forward, -1 = none; see h2o_attention_decode. Then those that
        left since a budget moved; after a budget was set, those that left at once.
    journal : Journal or None
        What `crop` can take back, while forwards are recorded.
    scoring : dict
        How h2o_attention_decode scores and reads here: `gqa_reduce`, and rules other than H2O's.
    """

    is_sliding = False

    def __init__(self, settings: Settings, progress: Progress, layer_idx: int) -> None:
        super().__init__(settings, progress, layer_idx)
        self._known_config = settings.config
        self.scoring = {"gqa_reduce": settings.policy.gqa_reduce, **rules_of(settings.policy)}
        if settings.policy.score_rule == "random":
            self.scoring["score_seed"] = settings.policy.layer_seed(layer_idx)

    def __repr__(self) -> str:
        return f"H2OLayer(layer_idx={self.layer_idx}, capacity={self.capacity})"

    @property
    def supports_early_init(self) -> bool:
        """Whether the capacity is known before the prompt."""
        return not self.settings.policy.has_ratio or self.settings.prompt_length is not None

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the decode step: not while each is recorded anew."""
        return self._progress.compileable and self.journal is None

    def window(self) -> int | None:
        """`configured_window` as it was when this sequence started: a config is slow to ask."""
        return self.configured_window() if self.columns_seen == 0 else self._window

    def configured_window(self) -> int | None:
        """Sliding window, in tokens, that the model's config gives to this layer; None = none."""
        config = self.settings.config
        layer_types = getattr(config, "layer_types", None)
        if layer_types and layer_types[self.layer_idx] != "sliding_attention":
            return None
        if getattr(config, "use_sliding_window", None) is False:
            return None
        return getattr(config, "sliding_window", None) or None

    # ---- The step.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the layer over to the attention function, on the key tensor. Stores nothing."""
        self._progress.awaiting = self.layer_idx
        # A tensor object of our own carries the layer.
        key_states = key_states.view_as(key_states)
        setattr(key_states, LAYER_ATTRIBUTE, self)
        return key_states, value_states

    def take_over(self, config: Any) -> None:
        """Note that the attention function has found this layer; `config` is that of its module.

        Raises
        ------
        ValueError
            The module belongs to another model than the cache.
        """
        self._progress.awaiting = None
        if config is None or config is self._known_config:
            return
        ours, theirs = model_shape(self.settings.config), model_shape(config)
        if ours != theirs:
            raise ValueError(
                f"H2OCache: the model must be the one of the cache's config, {ours}, got {theirs}"
            )
        self._known_config = config

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scale: float | None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Attend, score, evict and store the new tokens: one call of h2o_attention_decode.

        Parameters
        ----------
        query : Tensor, [batch, num_q_heads, num_new, head_dim]
        key, value : Tensor, [batch, num_kv_heads, num_new, head_dim]
            Any strides. Cast to the dtype of the cache. With positions="rolling" neither query nor key
            is rotated.
        attention_mask : Tensor, bool, [batch, 1, 1, num_new], optional
            True = real token. A [batch, 1, num_new, num_new] mask is taken if it says the same:
            causal, and the padding.
        scale : float, optional
            Factor on query . key. Default head_dim ** -0.5.
        alibi_slopes : Tensor, float32 or float64, [num_q_heads], optional
            Adds slope * (key position - query position) to the logits.

        Returns
        -------
        output : Tensor, dtype of the query, [batch, num_new, num_q_heads, head_dim]
            Zeros where a token is padding.

        Raises
        ------
        ValueError
            The mask is of another kind, or the shapes are not those that the cache was filled with.
        """
        batch, _, num_new, _ = key.shape
        real = None
        if attention_mask is not None:
            earlier = self.columns_seen if self.settings.whole_masks else None
            real = real_tokens(attention_mask, batch, num_new, earlier)
        if self.columns_seen > 0 and batch != self.batch_size:
            raise ValueError(
                f"H2OCache: layer {self.layer_idx} holds batch={self.batch_size}, got {batch} rows; "
                "use a new cache or reset() for another batch"
            )
        self.own()
        # A compiled step is one graph: nothing in it can be undone.
        undo = None
        if not torch.compiler.is_compiling():
            undo = self._progress.begin(self.layer_idx, self.__dict__)
        if self.columns_seen == 0:
            undo = None  # Empty again, if need be.
            self._start(key, value, real)
        assert self.keys is not None

        self._alibi_slopes = alibi_slopes
        dtype = self.keys.dtype
        vectors = _cast(query, dtype), _cast(key, dtype), _cast(value, dtype)
        new = _NewTokens(*vectors, *self._number(real, num_new), scale)
        if self.journal is None:
            output = self._join(new, undo)
        else:
            output = self._recorded_step(self.journal, new, undo)
        self.columns_seen += num_new
        if num_new > 1 and not torch.compiler.is_compiling():
            self.columns_seen = Variable(self.columns_seen)
        output = _cast(output, query.dtype).transpose(1, 2).contiguous()
        self._progress.end(self.layer_idx)
        return output

    def _step(self, new: _NewTokens, chunk: int, room: Room | StepRoom | None = None) -> Tensor:
        """Call h2o_attention_decode on the state of this layer; `room` takes what leaves."""
        assert self.tokens_seen is not None
        into = {}
        if room is not None:
            into = {"k_evicted": room.k_evicted, "v_evicted": room.v_evicted}
        atomic = isinstance(room, Room) and not torch.compiler.is_compiling()
        step = partial(
            _attention_decode._op if atomic else _attention_decode,
            new.query,
            self.keys,
            self.values,
            self.scores,
            self.positions,
            new.key,
            new.value,
            new.position,
            *self._counts,
            scale=new.scale,
            chunk=chunk,
            alibi_slopes=self._alibi_slopes,
            row_budget=self.row_budget,
            **self.scoring,
            **into,
            **self._angles(new, chunk),
            **self.given_scores(new.position),
        )
        output: Tensor
        if atomic:
            assert isinstance(room, Room)
            # No bytecode, and so no interrupt, between what the operator does and its result here.
            room.results.extend(starmap(step, [()]))
            output, self.last_evicted = room.results[-1]
        else:
            output, self.last_evicted = step()
        self.tokens_seen.add_(new.added)
        return output

    def given_scores(self, position: Tensor) -> dict[str, Tensor]:
        """`score_new` of h2o_attention_decode for new tokens at positions [batch, num_new], if any."""
        if self.settings.given_scores is None:
            return {}
        assert self.scores is not None
        given = self.settings.given_scores[self.layer_idx].to(self.scores)
        num_kv_heads, length = self.scores.shape[1], given.shape[1]
        if given.shape[0] != num_kv_heads:
            raise ValueError(
                f"H2OCache: given_scores must be [num_kv_heads = {num_kv_heads}, length], got "
                f"{list(given.shape)} in layer {self.layer_idx}"
            )
        scores = given[:, position.clamp(0, length - 1)].transpose(0, 1)
        return {"score_new": scores.masked_fill(position[:, None] >= length, 0)}

    def _angles(self, new: _NewTokens, chunk: int) -> dict[str, Tensor]:
        """What h2o_attention_decode rotates by, with positions="rolling"."""
        rolling = self.settings.rolling
        if rolling is None:
            return {}
        assert self.keys is not None
        capacity = self.keys.shape[2]
        num_ranks = capacity + min(chunk, new.key.shape[2])
        if num_ranks > rolling.context or rolling.follows_length:
            # Slots may be empty yet, and columns padding: the device is asked.
            rows = zip(self.most_kept(), _count_real(new.position).tolist(), strict=True)
            num_ranks = max((ranks_needed(*row, chunk, capacity) for row in rows), default=1)
        return rolling.by_rank(num_ranks, self.keys)

    def _room(self, new: _NewTokens) -> Room | Copies | StepRoom:
        """What will undo the step that these tokens are about to take."""
        num_new, state = new.key.shape[2], self.step_state()
        if self.row_target is not None or num_new >= state.keys.shape[2]:
            return Copies.of(state)
        if num_new != 1:
            return Room.of(state, new.key)
        room = self.step_room
        if room is None or not room.fits(self):
            room = self.step_room = StepRoom(state)
        room.take()
        return room

    def _join(self, new: _NewTokens, undo: Undo | None) -> Tensor:
        """Let new tokens join as the cache's prefill says."""
        room = None
        if undo is not None and undo.saved is None:
            room = undo.saved = self._room(new)
        if isinstance(room, Copies):
            room = None
        num_new = new.key.shape[2]
        output = self._step(new, self._chunk(num_new), room)
        if self.row_target is not None:
            self._advance(new.added, self.columns_seen + num_new)
        return output

    def _number(self, real: Tensor | None, num_new: int) -> tuple[Tensor, Tensor | int]:
        """Positions of the new tokens, int32 [batch, num_new], and how many of each row are real.

        They count the real tokens of a row, so a padded row is numbered like the row alone.
        """
        assert self.tokens_seen is not None
        assert self._one is not None
        first = self.tokens_seen.unsqueeze(1)
        if real is None:
            if num_new == 1:
                return first, self._one
            columns = torch.arange(num_new, dtype=torch.int32, device=first.device)
            return first + columns, num_new
        if num_new == 1:  # A decode step on a device: no kernel launch more than it needs.
            return torch.where(real, first, -1), real[:, 0]
        rank = real.cumsum(1, dtype=torch.int32)
        return torch.where(real, first + (rank - 1), -1), rank[:, -1]

    def _chunk(self, num_new: int) -> int:
        if num_new > 1 and self.settings.prefill == "streaming":
            return min(self.settings.prefill_chunk, num_new)
        return max(num_new, 1)

    # ---- Steps that can be taken back.

    def _recorded_step(self, journal: Journal, new: _NewTokens, undo: Undo | None) -> Tensor:
        """Do the step of `attend`, so that `crop` can undo it.

        Tokens of the prompt join as the cache's prefill says, and so do those of a forward that is
        too long to consist of drafts; all others join one by one and are recorded.
        """
        num_new = new.key.shape[2]
        in_prompt = self._prompt_columns(new.position)
        if not journal.takes(num_new - in_prompt):
            self.journal = journal.cleared(unverified=num_new)
            return self._join(new, undo)
        if in_prompt == 0:
            return self._verify(journal, new, undo)
        self.journal = journal.cleared()
        if in_prompt == num_new:
            return self._join(new, undo)
        if undo is not None:
            undo.saved = Copies.of(self.step_state())  # Two steps.
        # The prompt, then its first drafts. Those in memory of their own: a view would keep all.
        vectors, position = new[:3], new.position
        q, k, v = (tensor[:, :, :in_prompt] for tensor in vectors)
        first = position[:, :in_prompt]
        output = self._join(_NewTokens(q, k, v, first, _count_real(first), new.scale), undo)
        evicted = self.last_evicted
        assert evicted is not None
        q, k, v = (tensor[:, :, in_prompt:].clone() for tensor in vectors)
        rest = position[:, in_prompt:]
        drafts = _NewTokens(q, k, v, rest, _count_real(rest), new.scale)
        verified = self._verify(self.journal, drafts, undo, ahead=in_prompt)
        assert self.last_evicted is not None
        self.last_evicted = torch.cat([evicted, self.last_evicted], 2)
        return torch.cat([output, verified], 2)

    def _verify(
        self, journal: Journal, new: _NewTokens, undo: Undo | None, ahead: int = 0
    ) -> Tensor:
        """Let new tokens join one by one, and record it; `ahead` columns came before in this forward."""
        moves, state = self.row_target is not None, self.step_state()
        before, others = Before.of(state), self._copies_of_move()
        if moves and undo is not None and undo.saved is None:
            undo.saved = Copies.of(state)
        outputs, forwards = [], []
        # While a budget moves, each is a step for itself, as it would be without drafts.
        for piece in _singly(new) if moves else [new]:
            position = piece.position.clone()  # That of a single token lies in tokens_seen.
            # In memory of their own: whoever keeps one column later keeps no more.
            k_evicted, v_evicted = (piece.key.new_empty(piece.key.shape) for _ in range(2))
            room = Room(before, k_evicted, v_evicted)
            if undo is not None and undo.saved is None:
                undo.saved = room
            outputs.append(self._step(piece._replace(position=position), 1, room))
            ahead += position.shape[1]
            if self.row_target is not None:
                self._advance(piece.added, self.columns_seen + ahead)
            evicted = self.last_evicted
            assert evicted is not None
            left = evicted, room.k_evicted, room.v_evicted
            forwards.append(Forward(*piece[:3], position, *left, scale=piece.scale))
        self.journal = journal.with_entry(Entry(before, tuple(forwards), others))
        if len(outputs) == 1:
            return outputs[0]
        self.last_evicted = torch.cat([forward.evicted for forward in forwards], 2)
        return torch.cat(outputs, 2)

    def _prompt_columns(self, position_new: Tensor) -> int:
        """How many of the new columns belong to the prompt, whose length only the caller knows."""
        if not self._in_prompt:
            return 0
        assert self.tokens_seen is not None
        batch, num_new = position_new.shape
        if self.settings.prompt_length is None:
            if self.columns_seen == 0 and num_new > 1:
                raise ValueError(
                    "H2OCache: prompt_length must be given where forwards are recorded for "
                    f"assisted decoding, got None: the first forward has {num_new} tokens, and which "
                    "of them are drafts is not for the cache to see; make it with "
                    "H2OCache(..., prompt_length=input_ids.shape[1])"
                )
            self._in_prompt = False
            return 0
        positions = position_new.cpu()
        lengths = torch.tensor(self._given_lengths(batch), device=positions.device)[:, None]
        is_draft = positions >= lengths
        columns = is_draft.any(0).nonzero()
        first_draft = int(columns[0]) if len(columns) else num_new
        if ((positions >= 0) & ~is_draft)[:, first_draft:].any():
            raise ValueError(
                "H2OCache: prompts must end in the same column in every row where forwards are "
                f"recorded, got prompt_length={self.settings.prompt_length}, with which column "
                f"{self.columns_seen + first_draft} is past the end in some rows only"
            )
        seen = self.tokens_seen.cpu() + _count_real(positions)
        self._in_prompt = bool((seen < lengths[:, 0]).any())
        return first_draft

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row of this layer, in place; see `H2OCache.crop`."""
        self.settle()
        self.check_crop(tokens_to_remove)
        self._progress.change(self.cropping(tokens_to_remove))

    def cropping(self, tokens_to_remove: int) -> Callable[[], None]:
        """What is to be done so that these tokens are taken back; doing it twice does no harm."""
        remove = self._removed_by(tokens_to_remove)
        if remove <= 0:
            return _nothing
        self.own()  # Its journal, too.
        journal = self.journal
        assert journal is not None
        columns_seen = self.columns_seen - remove
        held_later = self.held_at is not None and self.held_at > columns_seen
        return partial(self._take_back, journal.take_back(remove), columns_seen, held_later)

    def _take_back(self, tokens: TakenBack, columns_seen: int, held_later: bool) -> None:
        """Undo forwards and do some of them again; `held_later`: a budget came to hold in them."""
        with torch.inference_mode(False), torch.no_grad():
            tokens.undone.restore(self)
            self._aim(self.row_target)
            self.columns_seen = columns_seen - sum(one.num_columns for one in tokens.again)
            for forward in tokens.again:
                added = _count_real(forward.position)
                self._step(_NewTokens(*forward[:4], added, forward.scale), 1)
                self.columns_seen += forward.num_columns
                if self.row_target is not None:
                    self._advance(added, self.columns_seen)
            self._note_arrival(columns_seen)
        if held_later:
            self.held_at = None if self.row_target is not None else columns_seen
        entries = tokens.journal.entries
        self.last_evicted = entries[-1].forwards[-1].evicted if entries else None
        self.columns_seen = columns_seen
        self._in_prompt = self._in_prompt or columns_seen == 0
        self.journal = tokens.journal

    # ---- Allocation.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate for the shape, dtype and device of these keys; there may be 0 of them.

        Raises
        ------
        ValueError
            A ratio needs the prompt: give H2OCache a prompt_length.
        """
        self.settle()
        if not self.supports_early_init:
            raise ValueError(
                "H2OCache: prompt_length must be given to allocate before the prompt with a policy "
                f"of ratios, got {self.settings.policy!r}"
            )
        self._allocate(key_states, key_states if value_states is None else value_states, None)

    def _start(self, key: Tensor, value: Tensor, real: Tensor | None) -> None:
        self._window = self.configured_window()
        if torch.compiler.is_compiling():
            if self.budget is None or self.batch_size != key.shape[0]:
                raise RuntimeError(
                    "H2OCache: a first forward that is compiled must find its memory, got a cache "
                    "without: call early_initialization() before, or leave prefill_chunk_size out"
                )
            return
        lengths = None
        if self.settings.policy.has_ratio and self.settings.prompt_length is None:
            batch, _, num_new, _ = key.shape
            lengths = [num_new] * batch if real is None else real.sum(1).tolist()
        self._allocate(key, value, lengths)

    # ---- What transformers asks of a layer.

    def get_seq_length(self, *args: Any) -> int:
        """Columns seen, not slots in use: position ids and input slicing come from it.

        Those of complete forwards: one that is under way, or stopped half-way, does not count yet.
        """
        self._progress.finish()
        undo = self._progress.undo.get(self.layer_idx)
        columns_seen: int = self.columns_seen if undo is None else undo.attributes["columns_seen"]
        return columns_seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(length, offset) of the keys that a mask must cover: the new ones alone.

        Called before the embedding, so what no step could undo is refused here.
        """
        if isinstance(query_length, Tensor):  # cache_position, before transformers 5.12
            query_length = query_length.shape[0]
        self.settings.check_pairing()
        self._check_positions(query_length)
        return query_length, self.get_seq_length()

    def _check_positions(self, num_new: int) -> None:
        limit = self.settings.max_positions
        if limit is None or self.get_seq_length() + num_new <= limit:
            return
        # Columns of padding take no position; only here, past the limit, is it worth to look.
        tokens_seen = self.complete("tokens_seen")
        seen = 0 if tokens_seen is None else int(tokens_seen.max())
        if seen + num_new > limit:
            raise ValueError(
                f"H2OCache: positions of this model must be < {limit} (max_position_embeddings), "
                f"got {num_new} new tokens after {seen}; evicting does not move positions"
            )

    def get_max_length(self) -> int:
        """-1: a layer of any budget takes any number of tokens."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Name of `get_max_length` in earlier releases."""
        return -1

    def reset(self) -> None:
        """Forget everything, budgets of ratios included; memory that is not shared stays allocated."""
        self._progress.undo.pop(self.layer_idx, None)
        if self._hold is not None and not self._hold.owns:
            self.let_go()
        self.own()
        self.columns_seen = 0
        self.budget = None
        self.row_budget = None
        self._aim(None)
        self.held_at = None
        self.last_evicted = None
        self._record_from_the_start()
        if self.is_initialized:
            self._empty(slice(None))


def _singly(new: _NewTokens) -> Iterator[_NewTokens]:
    """Each column for itself."""
    for i in range(new.key.shape[2]):
        column = slice(i, i + 1)
        q, k, v = (tensor[:, :, column] for tensor in new[:3])
        position = new.position[:, column]
        yield _NewTokens(q, k, v, position, _count_real(position), new.scale)


def _nothing() -> None:
    """Change nothing."""


def _count_real(positions: Tensor) -> Tensor:
    """Tokens that are no padding, int32 [batch], of positions [batch, num_new]."""
    return (positions >= 0).sum(1, dtype=torch.int32)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes longer to find out that it has nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
