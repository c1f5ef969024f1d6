"""Progress bars on stderr, of bytes and of steps: shown at a terminal only, gone when the work ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def byte_progress(what: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Yield a function of (bytes done, bytes in all)."""
    return _bar(what, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def step_progress(what: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Yield a function of (steps done, steps in all)."""
    return _bar(what, MofNCompleteColumn(), TimeRemainingColumn())


@contextmanager
def _bar(what: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    all_columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*all_columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
