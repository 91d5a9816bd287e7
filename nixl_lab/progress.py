# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a person sees of a scenario: the step under way, and a table at the end."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text


class Steps:
    """Shows steps as they run and keeps their times.

    On a terminal the step under way has a spinner and a clock; elsewhere each
    step makes one line when it begins and one when it ends.

    Attributes:
        status: Says how the whole is going; shown beside each step.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.status: Callable[[], str] = str
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._rows: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Runs one step under a title."""
        start = time.monotonic()
        try:
            with self._under_way(title):
                yield
        except BaseException:
            self._say(f"FAILED  {title}")
            raise
        self.record(title, time.monotonic() - start)

    def record(self, title: str, seconds: float) -> None:
        """Adds a step that was timed elsewhere."""
        self._rows.append((title, seconds))
        status = self.status()
        self._say(f"{seconds:6.1f} s  {title}" + (f"  [{status}]" if status else ""))

    def note(self, text: str) -> None:
        """Shows a line that is not a step of its own."""
        self._say(f"{'':10}{text}")

    def table(self) -> None:
        """Shows all steps with their times."""
        table = Table("step", title="what happened")
        table.add_column("seconds", justify="right")
        for title, seconds in self._rows:
            table.add_row(title, f"{seconds:.1f}")
        self._console.print(table)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextlib.contextmanager
    def _under_way(self, title: str) -> Iterator[None]:
        if not self._console.is_terminal:
            self._say(f"  ...     {title}")
            yield
            return
        columns = (SpinnerColumn(), TextColumn(title, markup=False))
        with Progress(
            *columns,
            TimeElapsedColumn(),
            _StatusColumn(self.status),
            console=self._console,
            transient=True,
        ) as spinner:
            spinner.add_task(title, total=None)
            yield


class _StatusColumn(ProgressColumn):
    """The status, asked for anew at each refresh."""

    def __init__(self, status: Callable[[], str]) -> None:
        super().__init__()
        self._status = status

    def render(self, task: Task) -> Text:
        return Text(self._status())
