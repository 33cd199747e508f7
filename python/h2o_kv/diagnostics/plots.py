"""The plot of an explanation: where the evidence still was, layer by layer, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from h2o_kv.diagnostics.explain import SpanExplanation
from h2o_kv.figures import load_pyplot

__all__ = ["plot_spans"]


def plot_spans(file: Path, spans: Sequence[SpanExplanation], prompt_tokens: int) -> None:
    """Draw a heat map for each span: share of KV heads and tokens that still hold it.

    Parameters
    ----------
    file : Path
        Its suffix says the format.
    spans : sequence of SpanExplanation
    prompt_tokens : int
        A line is drawn where the answer begins.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError, OSError
        The format is unknown, or the file cannot be written.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(
        len(spans), 1, figsize=(9, 1 + 3 * len(spans)), squeeze=False, layout="constrained"
    )
    for axis, explained in zip(axes[:, 0], spans, strict=True):
        span, held = explained.span, explained.held
        layers, steps = held.shape
        left = span.last - 1.5
        image = axis.imshow(
            held.numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=1,
            extent=(left, left + steps, layers - 0.5, -0.5),
        )
        axis.axvline(prompt_tokens - 1, color="white", linestyle="--", linewidth=1)
        # A dollar sign would begin a formula.
        text = span.text.replace("$", r"\$").replace("\n", " ")[:60]
        axis.set(title=f"{text} ({explained.state})", xlabel="step", ylabel="layer")
        figure.colorbar(image, ax=axis, label="share still held")
    try:
        figure.savefig(file, dpi=120)
    finally:
        pyplot.close(figure)
