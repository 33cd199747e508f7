"""Position rolling: a token's position is its rank among the tokens that are kept.

A cache made with positions="rolling" holds keys without their rotation. In every step each key is
rotated by its rank among the kept tokens of its KV head, and the new tokens by the ranks that follow,
so no rotation is ever by more than budget + new tokens, however long the stream. With sinks and no
heavy hitters this is StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453, section 3.2); with heavy
hitters, H2O joined to it. The angles are those of the model's own rotary module, scaled ones and those
of a part of head_dim too; h2o_attention_decode rotates by them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROLLING_MODELS", "Rolling", "ranks_needed"]

# Models in which one rotary module serves all layers, the halves of a head are turned together, and
# nothing happens to queries and keys between their rotation and attention.
ROLLING_MODELS = ("gpt_neox", "llama", "mistral", "qwen2")

_rotate = torch.ops.h2o.h2o_rotate.default


class Rolling:
    """The rotation of one model: how it is undone, and its angles by rank.

    Parameters
    ----------
    model : PreTrainedModel
        One of ROLLING_MODELS.

    Raises
    ------
    ValueError
        The model is of another kind.

    Attributes
    ----------
    context : int
        Positions that the model knows.
    follows_length : bool
        Whether its angles depend on the longest position: then those of ranks are asked for the very
        number that is in use.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        if config.model_type not in ROLLING_MODELS:
            raise ValueError(
                f'H2OCache: positions="rolling" needs a model of {ROLLING_MODELS}, got '
                f'"{config.model_type}"'
            )
        decoder = model.get_decoder() or model
        found = [m for m in decoder.modules() if type(m).__name__.endswith("RotaryEmbedding")]
        if len(found) != 1:
            raise ValueError(
                'H2OCache: positions="rolling" needs a model with one rotary embedding, got '
                f"{len(found)} in {type(decoder).__name__}"
            )
        self._rotary = found[0]
        self.context: int = config.max_position_embeddings
        rope_type = getattr(self._rotary, "rope_type", "default")
        self.follows_length = "dynamic" in rope_type or rope_type == "longrope"
        self._undoing: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._by_rank: tuple[Tensor, Tensor] | None = None

    def undo(
        self, query: Tensor, key: Tensor, position_ids: Tensor | None, *, first: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Take the model's rotation off again.

        Parameters
        ----------
        query, key : Tensor, [batch, heads, num_new, head_dim]
            As the model rotated them.
        position_ids : Tensor, [1 or batch, num_new]
            By which it did so.
        first : bool
            Whether this is the first layer of a forward. The others get the same tensor and share its
            angles; the next forward may get it again, with other numbers.

        Returns
        -------
        query, key : Tensor, as they were given

        Raises
        ------
        ValueError
            There are no position_ids.
        """
        if position_ids is None:
            raise ValueError(
                'H2OCache: the model must tell its position_ids to attention with positions="rolling", '
                "got None"
            )
        if key.shape[2] == 0:
            return query, key
        if first or self._undoing is None or self._undoing[0] is not position_ids:
            cos, sin = (_half(angle) for angle in self._rotary(key, position_ids))
            norm = cos.square() + sin.square()  # Not 1 where scaled, or rounded to 16 bits.
            rows, num_new, pairs = cos.shape
            index = torch.arange(rows * num_new, dtype=torch.int32, device=key.device)
            self._undoing = (
                position_ids,
                index.view(rows, 1, num_new),
                (cos / norm).view(-1, pairs),
                (-sin / norm).view(-1, pairs),
            )
        _, index, cos, sin = self._undoing
        return _rotate(query, index, cos, sin), _rotate(key, index, cos, sin)

    def prepare(self, like: Tensor) -> None:
        """Have the angles of decode steps on a cache of these keys, and of some more tokens at once."""
        if not self.follows_length:
            self.by_rank(max(1, min(2 * like.shape[2], self.context)), like)

    def by_rank(self, num_ranks: int, like: Tensor) -> dict[str, Tensor]:
        """Angles of at least `num_ranks` ranks, as h2o_attention_decode takes them beside `like`.

        Raises
        ------
        ValueError
            They are more than the model's context has.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        angles = self._by_rank
        if (
            angles is None
            or len(angles[0]) < num_ranks
            or (self.follows_length and len(angles[0]) > num_ranks)
            or angles[0].dtype != dtype
            or angles[0].device != like.device
        ):
            if num_ranks > self.context:
                raise ValueError(
                    "H2OCache: tokens kept and those that join them must be <= "
                    f'max_position_embeddings = {self.context} with positions="rolling", got '
                    f'{num_ranks}; prefill="streaming" lets prefill_chunk of them join at a time'
                )
            length = num_ranks
            if not self.follows_length:
                length = min(2 ** (num_ranks - 1).bit_length(), self.context)
            rotary = copy.deepcopy(self._rotary)  # What the model's own has seen is its affair.
            ranks = torch.arange(length, device=like.device)[None]
            x = like.new_empty(0, dtype=dtype)
            rotary(x, ranks[:, :1])  # As if nothing longer had been.
            cos, sin = rotary(x, ranks)
            self._by_rank = angles = _half(cos)[0].contiguous(), _half(sin)[0].contiguous()
        return {"rope_cos": angles[0], "rope_sin": angles[1]}


def _half(angles: Tensor) -> Tensor:
    """Those of the pairs: the second half repeats the first. In float32, or float64 if they are."""
    pairs = angles.shape[-1] // 2
    return angles[..., :pairs].to(torch.promote_types(angles.dtype, torch.float32))


def ranks_needed(kept: int, num_new: int, chunk: int, capacity: int) -> int:
    """How many ranks a row takes that keeps `kept` tokens while `num_new` join, `chunk` at a time."""
    starts = range(0, max(num_new, 1), chunk)
    return max(min(kept + i, capacity) + min(chunk, num_new - i) for i in starts)
