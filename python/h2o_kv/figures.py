"""What all plots share: matplotlib for files, and a grid of panels."""

from __future__ import annotations

from typing import Any

__all__ = ["load_pyplot", "panel_grid"]

_MOST_COLUMNS = 3


def load_pyplot() -> Any:
    """matplotlib.pyplot for files.

    Raises
    ------
    ImportError
        matplotlib is not installed; the message says how to.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "h2o-kv[bench]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def panel_grid(pyplot: Any, count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure, and `count` panels of this size in inches in it, up to three in a row."""
    columns = min(_MOST_COLUMNS, count)
    rows = -(-count // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    for panel in panels.flat[count:]:
        panel.set_visible(False)
    return figure, list(panels.flat[:count])
