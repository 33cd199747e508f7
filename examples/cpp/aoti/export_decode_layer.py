"""Exports an attention layer with an H2O cache for run_decode_layer, as an AOTInductor package.

    python export_decode_layer.py LIBRARY FOLDER

LIBRARY is the libh2o.so of the C++ package. Writes FOLDER/decode_layer.pt2, and FOLDER/expected.pt: the
inputs of some decode steps and what they give in Python.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

NUM_SINK, NUM_HEAVY, NUM_RECENT = 1, 6, 5
BATCH, STEPS = 2, 40


class DecodeLayer(nn.Module):
    """Projects one new token a row, attends over the cache and writes into it."""

    def __init__(self, hidden: int, num_q_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // num_q_heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, num_kv_heads * self.head_dim)
        self.value = nn.Linear(hidden, num_kv_heads * self.head_dim)
        self.output = nn.Linear(hidden, hidden)

    def heads(self, projected: Tensor) -> Tensor:
        """[batch, 1, heads * head_dim] -> [batch, heads, 1, head_dim]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        hidden: Tensor,
        position: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scores: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output, and the position that each KV head evicted; the cache is written."""
        attended, evicted = torch.ops.h2o.h2o_attention_decode(
            self.heads(self.query(hidden)),
            k_cache,
            v_cache,
            scores,
            positions,
            self.heads(self.key(hidden)),
            self.heads(self.value(hidden)),
            position,
            NUM_SINK,
            NUM_HEAVY,
            NUM_RECENT,
        )
        return self.output(attended.transpose(1, 2).flatten(2)), evicted


def empty_cache(num_kv_heads: int, head_dim: int) -> list[Tensor]:
    """k_cache, v_cache, scores, positions."""
    shape = (BATCH, num_kv_heads, NUM_SINK + NUM_HEAVY + NUM_RECENT)
    return [
        torch.zeros(*shape, head_dim),
        torch.zeros(*shape, head_dim),
        torch.zeros(shape),
        torch.full(shape, -1, dtype=torch.int32),
    ]


@torch.no_grad()
def main(folder: Path) -> None:
    """Export, compile, and run the same steps here."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    layer = DecodeLayer(hidden=64, num_q_heads=4, num_kv_heads=2).eval()
    hidden = torch.randn(STEPS, BATCH, 1, 64)
    position = torch.arange(STEPS).view(STEPS, 1, 1).expand(STEPS, BATCH, 1)

    program = torch.export.export(layer, (hidden[0], position[0], *empty_cache(2, 16)))
    package = folder / "decode_layer.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))

    cache = empty_cache(2, 16)
    steps = [layer(*inputs, *cache) for inputs in zip(hidden, position, strict=True)]
    output, evicted = (torch.stack(results) for results in zip(*steps, strict=True))
    expected = dict(hidden=hidden, position=position.contiguous(), output=output, evicted=evicted)
    names = ("k_cache", "v_cache", "scores", "positions")
    torch.save(expected | dict(zip(names, cache, strict=True)), folder / "expected.pt")


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])  # with the Python package, `import h2o_kv` does it
    main(Path(sys.argv[2]))
