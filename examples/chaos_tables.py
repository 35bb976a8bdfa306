"""What chaos came to, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from chaos_course import Course, Ending
from chaos_ranks import Whom

_VICTIMS: Mapping[Whom, tuple[str, str]] = {
    "rank": ("one rank", "a spawned process"),
    "all": ("all ranks at once", "spawned processes"),
    "worker": ("the worker of a rank", "the process that writes for it"),
}
_MEANINGS = {
    "RuntimeError": "torch, in a collective of the training",
    "RankFailedError": "the library: it names the rank, or the worker, that is gone",
}
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
    name = f"training {number}, {course.backend}, {course.worker}"
    return f"{name}: {', '.join(parts)}; [green]{same}[/]"


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
    whom = Counter(ending.story.killed for ending in kills)
    for who, (what, how) in _VICTIMS.items():
        if whom[who]:
            table.add_row(f"  {what}", str(whom[who]), how)
    saving = sum(ending.was_saving for ending in kills)
    table.add_row("  with a save under way", str(saving), "the checkpoint stayed uncommitted")
    table.add_section()
    for who, what in (("rank", "ranks that survived"), ("worker", "ranks without their worker")):
        _add_survivors(table, what, [ending for ending in kills if ending.story.killed == who])
    table.add_section()
    resumed = sum(ending.story.resumed is not None for ending in endings)
    table.add_row("resumed from the newest commit", str(resumed), "found with latest_valid()")
    idle = sum(not ending.story.losses for ending in kills)
    table.add_row("killed before their first step", str(idle), "while starting or resuming")
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


def _add_survivors(table: Table, what: str, kills: Sequence[Ending]) -> None:
    codes = [code for ending in kills for code in ending.story.exit_codes if code >= 0]
    if not codes:
        return
    table.add_row(what, str(len(codes)), "none hung")
    errors = [error for ending in kills for error in ending.story.errors.values()]
    for name, count in Counter(error.split(":")[0] for error in errors).most_common():
        table.add_row(f"  ended with {escape(name)}", str(count), _MEANINGS.get(name, ""))
    if codes.count(0):
        table.add_row("  came to the last step", str(codes.count(0)), "")


def _reason(why: str) -> str:
    known = [words for text, words in _REASON_WORDS.items() if text in why]
    return known[0] if known else why
