"""Kill a training again and again at random moments: nothing is ever lost, and nothing is wrong.

    python examples/chaos.py [--kills 40] [--minutes 13] [--world 2] [--seed 0] [--steps 120]
    python examples/chaos.py --incremental
    python examples/chaos.py --store s3://bucket/chaos

The small GPT is trained with tensor parallelism by real processes, which save behind the training
every few steps. One rank or all of them die of SIGKILL; those that survive must notice and end by
themselves; then new processes resume from the latest valid checkpoint. When a training has reached
its last step, another one begins with the next backend. This fails unless

* every loss, also of steps that are trained again, has the bits of a run that nobody disturbed;
* no life finds less than was committed before it, and none hangs;
* every checkpoint that is left at the end of a training is whole.

With ``--incremental`` the embedding is frozen, and each checkpoint shares it with the one before,
which retention deletes. Then the checkpoints that are left must share files. With ``--store`` the
checkpoints are in an object store, and there is one backend.

The seed decides who dies and when, but not what the victims are doing at that moment.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from rich.console import Console

from chaos_course import Course, Mayhem, remove_run
from chaos_life import ChaosError, Job
from chaos_report import course_line, draw_chaos, summary_table
from harness import add_folder, output_folder, wide_console

BACKENDS = ("tensorstore", "zarr", "torch_dist")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40, help="so many, or what fits the time")
    parser.add_argument(
        "--minutes", type=float, help="no kill after so long; by default 1 for every 3 kills"
    )
    parser.add_argument("--world", type=int, default=2, choices=(1, 2, 4), help="number of ranks")
    parser.add_argument("--seed", type=int, help="who dies and when; by default another every time")
    parser.add_argument("--steps", type=int, default=120, help="of each training")
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--incremental", action="store_true", help="share what has not changed")
    parser.add_argument("--store", metavar="URL", help="an object store for the checkpoints")
    add_folder(parser)
    arguments = parser.parse_args()
    if arguments.store and arguments.incremental:
        parser.error("objects cannot share bytes: --store or --incremental")
    if arguments.minutes is None:
        arguments.minutes = max(1.0, arguments.kills / 3)
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(10_000)
    arguments.folder = output_folder(parser, arguments.folder, "chaos-")
    return arguments


def main() -> None:
    arguments, console = _arguments(), wide_console()
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
        place = arguments.store or arguments.folder
        console.print(f"the checkpoints are still in {place}", soft_wrap=True)
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
    courses: list[Course] = []
    with console.status("undisturbed") as status:

        def tell(course: Course) -> None:
            name = f"training {len(courses)}, {course.job.backend}" if courses else "undisturbed"
            done = f"{mayhem.kills_done} of {arguments.kills} kills, step {course.reached}"
            status.update(f"{name}: {done}, {course.resumes} resumes")

        # The format torch_dist cannot share files.
        backends: tuple[str, ...] = BACKENDS[:2] if arguments.incremental else BACKENDS
        root: Path | str = arguments.folder
        if arguments.store:
            backends, root = BACKENDS[:1], f"{arguments.store}/{arguments.folder.name}"
        while not courses or mayhem.goes_on:
            number = max(0, len(courses) - 1)
            job = Job(
                _place(root, f"training-{len(courses)}"),
                backends[number % len(backends)],
                arguments.steps,
                arguments.save_every,
                arguments.incremental,
            )
            course = Course(job)
            mayhem.run(course, courses[0].losses if courses else None, tell)
            console.print(course_line(len(courses), course))
            courses.append(course)
            remove_run(job.folder)
    return courses


def _place(root: Path | str, name: str) -> Path | str:
    return root / name if isinstance(root, Path) else f"{root}/{name}"


if __name__ == "__main__":
    main()
