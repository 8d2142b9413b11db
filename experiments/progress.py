"""Live progress: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """One bar after the other: `start` a stage, `update` it, `stop` it.

    Use as a context manager, so that the terminal is left in order.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        """Write to `file`, by default to standard output."""
        self._console = Console(file=file or sys.stdout, highlight=False)
        self._bar: RichProgress | None = None
        self._name, self._unit, self._total = "", "", 0
        self._last_line = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=12)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start(self, name: str, total: int, done: int = 0, unit: str = "round") -> None:
        """Begin a stage of `total` units of which `done` are done already."""
        self.stop()
        self._name, self._unit, self._total = name, unit, total
        self._marks.clear()
        self._marks.append((time.monotonic(), done))
        self._last_line = time.monotonic()
        if not self._console.is_terminal:
            more = f", continuing at {unit} {done}" if done else ""
            self.say(f"{name}: {total} {unit}s{more}")
            return
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
        )
        self._bar.add_task(name, total=total, completed=done, note="compiling")
        self._bar.start()

    def update(self, done: int, note: str = "") -> None:
        """Say that `done` units are done; `note` goes beside the time left."""
        now = time.monotonic()
        self._marks.append((now, done))
        note = ", ".join(part for part in (note, self._time_left(done)) if part)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, note=note)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            more = f", {note}" if note else ""
            self.say(f"{self._name}: {self._unit} {done} of {self._total}{more}")

    def stop(self) -> None:
        """End the stage; its bar stays on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _time_left(self, done: int) -> str:
        # From the last few updates only: compilation at the start says nothing
        # about the rest.
        begin, first = self._marks[0]
        if done <= first or done >= self._total:
            return ""
        rate = (time.monotonic() - begin) / (done - first)
        return f"{format_seconds(rate * (self._total - done))} left"


def format_seconds(seconds: float) -> str:
    """Write a duration as 8 s, 1:05 min or 2:00:00 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
