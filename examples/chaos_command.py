"""The command line of ``chaos.py``, and what it prints."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chaos_course import Course, Mayhem
from chaos_picture import draw_chaos
from chaos_ranks import ChaosError, Worker
from chaos_tables import course_line, summary_table

BACKENDS = ("tensorstore", "zarr", "torch_dist")
WORKERS: tuple[Worker, ...] = ("thread", "process")


def _arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40, help="so many, or what fits the time")
    parser.add_argument(
        "--minutes", type=float, help="no kill after so long; by default 1 for every 10 kills"
    )
    parser.add_argument("--world", type=int, default=2, help="ranks: 1, 2 or 4")
    parser.add_argument("--seed", type=int, help="who dies and when; by default another every time")
    parser.add_argument("--steps", type=int, default=120, help="of each training")
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--worker", choices=WORKERS, help="who writes; by default they take turns")
    parser.add_argument("--folder", type=Path, help="a new or empty folder for all that is written")
    arguments = parser.parse_args()
    if arguments.world not in (1, 2, 4):
        parser.error("--world must be 1, 2 or 4: the ranks share 4 heads")
    if arguments.minutes is None:
        arguments.minutes = max(1.0, arguments.kills / 10)
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10_000)
    if arguments.folder is None:
        now = datetime.now().astimezone()
        arguments.folder = Path("demo-output") / f"chaos-{now:%Y%m%d-%H%M%S}"
    if arguments.folder.exists() and any(arguments.folder.iterdir()):
        parser.error(f"{arguments.folder} is not empty; name a new folder")
    return arguments


def main(description: str) -> None:
    """Read the command line and do it.

    Args:
        description: for ``--help``.
    """
    arguments = _arguments(description)
    console = Console(width=None if sys.stdout.isatty() else 116, highlight=False)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    repeat = f"--seed {arguments.seed} --kills {arguments.kills} --world {arguments.world}"
    console.print(f"Chaos with {repeat}, for at most {arguments.minutes:g} minutes", style="bold")
    begin = time.monotonic()
    mayhem = Mayhem(
        world_size=arguments.world,
        random=random.Random(arguments.seed),  # noqa: S311 - not for secrets
        kills=arguments.kills,
        deadline=begin + 60 * arguments.minutes,
    )
    try:
        courses = _wreak(mayhem, arguments, console)
    except ChaosError as error:
        console.print(f"the checkpoints are still in {arguments.folder}", soft_wrap=True)
        raise SystemExit(f"FAILED ({repeat}): {error}") from error
    finally:
        mayhem.end()
    draw_chaos(courses, arguments.folder / "chaos.png")
    console.print(summary_table(courses[0], courses[1:], time.monotonic() - begin))
    if mayhem.kills_done < arguments.kills:
        missing = f"{mayhem.kills_done} of {arguments.kills} kills fitted the time"
        console.print(f"{missing}; --minutes gives it more", style="yellow")
    console.print(f"picture  {arguments.folder / 'chaos.png'}", soft_wrap=True)


def _wreak(mayhem: Mayhem, arguments: argparse.Namespace, console: Console) -> list[Course]:
    """The undisturbed training first, then those that are killed."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TextColumn("kills  {task.fields[told]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    courses: list[Course] = []
    with bar:
        task = bar.add_task("undisturbed", total=arguments.kills, told="")

        def tell(course: Course) -> None:
            told = f"{course.resumes} resumes, {len(course.skipped)} skipped, step {course.reached}"
            name = f"training {len(courses)}, {course.backend}" if courses else "undisturbed"
            bar.update(task, completed=mayhem.kills_done, told=told, description=name)

        while not courses or mayhem.goes_on:
            number = max(0, len(courses) - 1)
            backend = BACKENDS[number % len(BACKENDS)]
            worker = arguments.worker or WORKERS[number % len(WORKERS)]
            folder = arguments.folder / f"training-{len(courses)}"
            course = Course(folder, backend, arguments.steps, arguments.save_every, worker)
            expected = courses[0].losses if courses else None
            mayhem.run(course, expected, tell)
            console.print(course_line(len(courses), course))
            courses.append(course)
            shutil.rmtree(folder)
    return courses
