"""Sequences under the float64 reference attention: no H2OCache, no operator, no padding, no generate.

What the tests of whole features are compared with. The model's forward calls an attention function that
keeps the state of h2o_kv.reference; positions are given to it, and tokens are chosen here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from h2o_kv import reference

_NAME = "h2o_reference"


class ReferenceRow:
    """One sequence, and what is kept of it.

    Parameters
    ----------
    model : PreTrainedModel
        In float64, under "h2o".
    budget : (num_sink, num_heavy, num_recent)
    """

    running: ReferenceRow  # the one whose forward is running

    def __init__(self, model: Any, budget: tuple[int, int, int]) -> None:
        self.model, self.budget = model, budget
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        self.seen = 0

    def fork(self) -> ReferenceRow:
        other = copy.copy(self)
        other.layers = {
            i: tuple(tensor.clone() for tensor in state) for i, state in self.layers.items()
        }
        return other

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Logits [vocabulary] after `ids` [length], which join together."""
        ReferenceRow.running = self
        self.model.set_attn_implementation(_NAME)
        try:
            output = self.model(ids[None], position_ids=self._positions(len(ids)), use_cache=False)
        finally:
            self.model.set_attn_implementation("h2o")
        self.seen += len(ids)
        logits: Tensor = output.logits[0, -1]
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        shape = (1, key.shape[1], sum(self.budget))
        if layer not in self.layers:
            self.layers[layer] = (
                torch.zeros(*shape, key.shape[3], dtype=torch.float64),
                torch.zeros(*shape, key.shape[3], dtype=torch.float64),
                torch.zeros(shape, dtype=torch.float64),
                torch.full(shape, -1, dtype=torch.int32),
            )
        num_new = key.shape[2]
        output, _ = reference.attention_decode(
            query,
            *self.layers[layer],
            key,
            value,
            self._positions(num_new),
            *self.budget,
            scale=scale,
            chunk=num_new,
        )
        return output.transpose(1, 2)

    def kept(self) -> list[list[list[int]]]:
        """Positions, ascending: [layer][KV head], as `hf_models.kept`."""
        return [
            [sorted(int(p) for p in head if p >= 0) for head in self.layers[i][3][0]]
            for i in sorted(self.layers)
        ]

    def greedy(self, forwards: list[Tensor], new: int) -> list[int]:
        """The `new` tokens that follow a text which comes in several forwards; none ends it."""
        for ids in forwards:
            logits = self.forward(ids)
        text = [int(logits.argmax())]
        while len(text) < new:
            logits = self.forward(torch.tensor(text[-1:]))
            text.append(int(logits.argmax()))
        return text

    def sampled(self, ids: Tensor, new: int) -> list[int]:
        """The same, drawn by torch's generator."""
        text: list[int] = []
        logits = self.forward(ids)
        while True:
            chances = logits.float().softmax(-1)
            text.append(int(torch.multinomial(chances, 1)))
            if len(text) == new:
                return text
            logits = self.forward(torch.tensor(text[-1:]))

    def beam(self, ids: Tensor, new: int, num_beams: int) -> list[int]:
        """The best of the texts that beam search finds, none of which ends before."""
        first = self.forward(ids)
        beams: list[tuple[float, list[int], ReferenceRow, Tensor]] = [(0.0, [], self, first)]
        for _ in range(new):
            totals = torch.stack([total + logits.log_softmax(-1) for total, _, _, logits in beams])
            best = totals.flatten().topk(num_beams)
            found = []
            for total, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                parent, token = divmod(index, totals.shape[1])
                _, text, row, _ = beams[parent]
                found.append((total, [*text, token], row))
            beams = []
            for total, text, row in found:
                row = row.fork()
                logits = first if len(text) == new else row.forward(torch.tensor(text[-1:]))
                beams.append((total, text, row, logits))
        return beams[0][1]

    def _positions(self, num_new: int) -> Tensor:
        return torch.arange(self.seen, self.seen + num_new)[None]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    running = ReferenceRow.running
    return running.attend(module.layer_idx, query, key, value, kwargs["scaling"]), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
