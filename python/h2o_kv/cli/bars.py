"""Progress on standard error."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Bars:
    """Bars of what takes long, by name; where there is no terminal, a line for each new text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: set[str] = set()
        self._tasks: dict[str, Any] = {}
        self._progress: Progress | None = None
        if console.is_terminal:
            # Few refreshes: the thread that draws takes time from what is measured.
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()

    @property
    def drawn(self) -> bool:
        """Whether there is a terminal to draw bars on."""
        return self._progress is not None

    def update(self, name: str, text: str, done: float) -> None:
        """Show that `done` (0 to 1) of a task is finished and that it is at `text`."""
        if self._progress is None:
            if text not in self._texts:
                self._console.print(text + " ...")
            self._texts.add(text)
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(text, total=1.0)
        self._progress.update(self._tasks[name], description=text, completed=done)

    def hide(self) -> None:
        """Take the bars off the screen, for good: text follows."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
