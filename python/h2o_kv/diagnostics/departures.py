"""When each token left each KV head: the whole history of an evicting cache in one tensor.

A token's position and the step at which it left say which tokens any step still had: D_t is what had
come by t and had not left before t. The token that leaves at t is in D_t, since the step attends
before it evicts.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["STAYED", "Departures"]

STAYED = torch.iinfo(torch.int32).max
"""In `Departures.left_at`: never left."""


class Departures:
    """Departures of one sequence under one cache.

    Parameters
    ----------
    num_layers, num_kv_heads, tokens : int
        The text's tokens; position p is its token p.

    Attributes
    ----------
    left_at : Tensor, int32, [num_layers, num_kv_heads, tokens]
        Position of the newest token when this one left; STAYED where it has not. A step is named by
        the position of its token; tokens that join in one chunk are one step, that of the last.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, tokens: int) -> None:
        self.left_at = torch.full((num_layers, num_kv_heads, tokens), STAYED, dtype=torch.int32)

    def record(self, layer: int, evicted: Tensor, first: int, chunk: int) -> None:
        """Note who left in one forward.

        Parameters
        ----------
        layer : int
        evicted : Tensor, int32, [num_kv_heads, num_new]
            `H2OLayer.last_evicted` of the row.
        first : int
            Position of the first new token.
        chunk : int
            Tokens that joined together in this forward.
        """
        heads, columns = (evicted >= 0).nonzero(as_tuple=True)
        num_new = evicted.shape[1]
        ends = torch.clamp((columns // chunk + 1) * chunk, max=num_new) - 1
        victims = evicted[heads, columns].long()
        self.left_at[layer, heads.cpu(), victims.cpu()] = (first + ends).to("cpu", torch.int32)

    def gone(self, layer: int, first: int, rows: int, tokens: int) -> Tensor:
        """Which tokens had left before each of some steps.

        Returns
        -------
        Tensor, bool, [num_kv_heads, rows, tokens]
            For the steps first .. first + rows - 1 and the tokens 0 .. tokens - 1.
        """
        steps = torch.arange(first, first + rows, dtype=torch.int32)
        return self.left_at[layer, :, None, :tokens] < steps[:, None]

    def held_share(self, first: int, last: int) -> Tensor:
        """Share of (KV head, token) that still held the tokens first .. last - 1, step by step.

        Returns
        -------
        Tensor, float64, [num_layers, steps]
            For the steps from last - 1, where all of them have come, to the end of the text.
        """
        left_at = self.left_at[:, :, first:last].flatten(1)
        steps = torch.arange(last - 1, self.left_at.shape[2])
        return (left_at[:, :, None] >= steps).double().mean(1)
