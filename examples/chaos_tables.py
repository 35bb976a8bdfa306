"""What chaos came to, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from chaos_course import Course, Ending

_REASON_WORDS = {
    "is not a distributed checkpoint": "killed before the commit",
}


def course_line(number: int, course: Course) -> str:
    """One training in a line."""
    if not course.kills and number == 0:
        first, last = (float.fromhex(course.losses[step]) for step in (1, course.steps))
        return f"undisturbed: {course.steps} steps, loss {first:.3f} -> {last:.3f}"
    again = course.num_trained - course.steps
    parts = [
        f"{len(course.kills)} kills",
        f"{course.resumes} resumes",
        f"{len(course.skipped)} checkpoints skipped",
        f"{again} steps trained again",
    ]
    same = f"all {course.num_trained} losses the same bits"
    return f"training {number}, {course.backend}: {', '.join(parts)}; [green]{same}[/]"


def summary_table(undisturbed: Course, courses: Sequence[Course], seconds: float) -> Table:
    """All trainings together: what was done to them, and what was found."""
    kills = [ending for course in courses for ending in course.kills]
    endings = [ending for course in courses for ending in course.endings]
    caption = f"{seconds:.0f} s, {undisturbed.steps} steps a training"
    table = Table(title="Chaos", caption=caption, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    table.add_row("killed with SIGKILL", str(len(kills)), "")
    for what, count in _victims(kills):
        table.add_row(f"  {what}", str(count), "real processes, spawned")
    saving = sum(ending.was_saving for ending in kills)
    table.add_row("  with a save under way", str(saving), "the checkpoint stayed uncommitted")
    table.add_section()
    survivors = sum(code != -9 for ending in kills for code in ending.story.exit_codes)
    table.add_row("ranks that survived", str(survivors), "noticed, and ended by themselves")
    errors = [error for ending in kills for error in ending.story.errors.values()]
    for name, count in Counter(error.split(":")[0] for error in errors).most_common():
        table.add_row(f"  with {escape(name)}", str(count), _meaning(name))
    if survivors > len(errors):
        table.add_row(
            "  without an error", str(survivors - len(errors)), "had done all their steps"
        )
    table.add_section()
    resumed = sum(ending.story.resumed is not None for ending in endings)
    begun = sum(ending.story.resumed is None for ending in endings) - len(courses)
    table.add_row("resumed from the latest valid step", str(resumed), "")
    table.add_row("begun again", str(max(0, begun)), "killed before the first commit")
    reasons = Counter(_reason(why) for course in courses for _, why in course.skipped)
    table.add_row("checkpoints skipped", str(reasons.total()), "")
    for reason, count in reasons.most_common():
        table.add_row(f"  {escape(reason)}", str(count), "")
    table.add_section()
    trained = sum(course.num_trained for course in courses)
    again = trained - sum(course.steps for course in courses)
    table.add_row("losses compared, bit for bit", str(trained), "[green]all the same[/]")
    table.add_row("  of steps trained again", str(again), "")
    whole = sum(course.verified for course in courses)
    table.add_row("checkpoints left, read in full", str(whole), "[green]all whole[/]")
    table.add_row("committed checkpoints lost", "0", "looked after every life")
    return table


def _victims(kills: Sequence[Ending]) -> list[tuple[str, int]]:
    everybody = sum(all(code == -9 for code in ending.story.exit_codes) for ending in kills)
    counted = [("one rank", len(kills) - everybody), ("all ranks at once", everybody)]
    return [(what, count) for what, count in counted if count]


def _reason(why: str) -> str:
    known = [words for text, words in _REASON_WORDS.items() if text in why]
    return known[0] if known else why


def _meaning(name: str) -> str:
    return {
        "RuntimeError": "torch, in a collective of the training",
        "RankFailedError": "the library: it names the rank that is gone",
    }.get(name, "")
