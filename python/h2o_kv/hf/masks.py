"""What an attention mask says of the new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["real_tokens"]


def real_tokens(attention_mask: Tensor, batch: int, num_new: int, earlier: int | None) -> Tensor:
    """Say which new tokens are real, bool [batch, num_new].

    Parameters
    ----------
    attention_mask : Tensor, [batch or 1, 1, 1 or num_new, num_new]
        bool, True = attended. It must be causal and hide padding, nothing else.
    batch, num_new : int
    earlier : int or None
        Columns of earlier tokens that the mask may have too, and then in numbers, 0 = attended.

    Raises
    ------
    ValueError
        The mask is of another kind.
    """
    mask = attention_mask
    # Columns of earlier tokens, if the model has them in its mask, say nothing new.
    whole = earlier is not None and mask.shape[-1] == earlier + num_new
    if (
        mask.ndim != 4
        or mask.shape[1] != 1
        or mask.shape[2] not in (1, num_new)
        or not (whole or (mask.dtype == torch.bool and mask.shape[3] == num_new))
    ):
        raise ValueError(
            "H2OCache: attention_mask must be 2-D (1 = real token, 0 = padding); which tokens "
            "are attended is the cache's own business, got a mask of shape "
            f"{list(mask.shape)} and dtype {mask.dtype} for {num_new} new tokens"
        )
    if mask.dtype != torch.bool:
        mask = mask == 0  # What is added to the logits.
    mask = mask[:, 0, :, -num_new:]
    real = mask[:, -1]
    if mask.shape[1] > 1:
        causal = torch.ones(num_new, num_new, dtype=torch.bool, device=mask.device).tril()
        if not torch.equal(mask, real[:, None] & causal):
            raise ValueError(
                "H2OCache: attention_mask must hide later tokens and padding, nothing else, "
                f"got another pattern of shape {list(attention_mask.shape)}"
            )
    return real.expand(batch, num_new)
