"""``make simulate``: play histories in a simulated world, and show one.

What a seed makes depends on the order of sets of strings, so their hashes are fixed.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table

from histories import History
from history_player import Failure, play, shortest

_CHUNK: Final = 20
_console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def simulate(
    seed: Annotated[
        int | None, typer.Option(help="Play the history of this seed, and show it.")
    ] = None,
    histories: Annotated[int, typer.Option(help="Play so many histories.")] = 1000,
    first: Annotated[int, typer.Option(help="Seed of the first one.")] = 0,
    processes: Annotated[int, typer.Option(help="Play in so many processes at a time.")] = 0,
    files: Annotated[
        str, typer.Option(help="Show only what is done to names with this in them.")
    ] = "",
) -> None:
    """Play a training that saves, loads, is killed and restarted, in a simulated world."""
    if seed is not None:
        failure = _show(History.of(seed), files)
    else:
        failure = _play_many(first, histories, processes or os.cpu_count() or 1)
    if failure is not None:
        raise typer.Exit(1)


def _play_many(first: int, count: int, processes: int) -> Failure | None:
    """Play histories until one fails, and look for a shorter one that fails as well."""
    begun, played = time.monotonic(), 0
    for failed in _failing_seeds(first, count, processes):
        played += _CHUNK
        if failed is None:
            continue
        _console.print(f"seed {failed} fails; looking for a shorter history")
        failure = _show(shortest(History.of(failed)))
        _console.print(f"To see this again: make simulate ARGS='--seed {failed}'")
        return failure
    seconds = time.monotonic() - begun
    last = first + count - 1
    _console.print(
        f"{count} histories, seeds {first} to {last}, in {seconds:.0f} s: nothing is lost"
    )
    return None


def _failing_seeds(first: int, count: int, processes: int) -> Iterator[int | None]:
    """The first seed that fails of each few seeds, if any."""
    starts = range(first, first + count, _CHUNK)
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in starts]
    if processes == 1:
        yield from map(_first_failing, chunks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _set_up, (context.Value("i", 0),)) as pool:
        yield from pool.map(_first_failing, chunks)
        pool.shutdown(cancel_futures=True)


def _set_up(started: Any = None) -> None:
    """Prepare this process; ``started`` counts those that share the cores."""
    if started is not None:
        with started.get_lock():
            cores = sorted(os.sched_getaffinity(0))
            # Its threads run one at a time, and take longer to hand over to another core.
            os.sched_setaffinity(0, {cores[started.value % len(cores)]})
            started.value += 1
    logging.disable(logging.CRITICAL)  # much goes wrong in these histories
    torch.set_num_threads(1)


def _first_failing(seeds: range) -> int | None:
    failing = next((s for s in seeds if isinstance(play(History.of(s)), Failure)), None)
    gc.collect()  # a world is a cycle
    gc.freeze()  # what is left is the library, at which the next collection need not look
    return failing


def _show(history: History, files: str = "") -> Failure | None:
    """Play a history, and print what it is and every operation."""
    outcome = play(history, keeps_log=True)
    failure = outcome if isinstance(outcome, Failure) else None
    world = outcome.world if isinstance(outcome, Failure) else outcome
    table = Table(box=None, pad_edge=False)
    for title in ("seconds", "process", "operation", "name", ""):
        table.add_column(title, justify="right" if title == "seconds" else "left", no_wrap=True)
    for done in world.log:
        if done.outcome == "event":
            table.add_section()
            table.add_row("", "", "", f"[bold]{done.name}[/bold]")
        elif files in done.path:
            path = done.path.removeprefix("/sim/").removeprefix("s3://")
            cells = (f"{done.seconds:.4f}", done.process, done.name, path, done.outcome)
            table.add_row(*cells)
    _console.print(table)
    _console.print(history.described())
    if failure is not None:
        _console.print(f"[red]{failure.error}[/red]")
    return failure


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    _set_up()
    typer.run(simulate)
