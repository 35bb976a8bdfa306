"""What chaos came to: a table for the terminal, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from chaos_course import Course, Ending
from chaos_life import Whom

mpl.use("Agg")  # a machine without a screen will do

_VICTIMS: Mapping[Whom, tuple[str, str, str]] = {
    "rank": ("one rank", "a spawned process", "x"),
    "all": ("all ranks at once", "spawned processes", "X"),
}
_MEANINGS = {
    "RuntimeError": "torch, in a collective of the training",
    "RankFailedError": "the library: it names the rank that is gone",
}
_UNCOMMITTED = "is not a distributed checkpoint"


def course_line(number: int, course: Course) -> str:
    """One training in a line."""
    job = course.job
    if not course.kills and number == 0:
        first, last = (float.fromhex(course.losses[step]) for step in (1, job.steps))
        return f"undisturbed: {job.steps} steps, loss {first:.3f} -> {last:.3f}"
    parts = [
        f"{len(course.kills)} kills",
        f"{course.resumes} resumes",
        f"{len(course.skipped)} checkpoints skipped",
        f"{course.num_trained - job.steps} steps trained again",
    ]
    if job.incremental:
        parts.append(f"{course.shared} files shared by {course.verified} checkpoints")
    same = f"all {course.num_trained} losses the same bits"
    return f"training {number}, {job.backend}: {', '.join(parts)}; [green]{same}[/]"


def summary_table(undisturbed: Course, courses: Sequence[Course], seconds: float) -> Table:
    """All trainings together: what was done to them, and what was found."""
    kills = [ending for course in courses for ending in course.kills]
    endings = [ending for course in courses for ending in course.endings]
    caption = f"{seconds:.0f} s, {undisturbed.job.steps} steps a training"
    table = Table(title="Chaos", caption=caption, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")

    def row(what: str, count: int, meaning: str = "") -> None:
        table.add_row(escape(what), str(count), meaning)

    row("killed with SIGKILL", len(kills))
    whom = Counter(ending.story.killed for ending in kills)
    for who, (what, how, _) in _VICTIMS.items():
        if whom[who]:
            row(f"  {what}", whom[who], how)
    saving = sum(ending.was_saving for ending in kills)
    row("  with a save under way", saving, "the checkpoint stayed uncommitted")
    table.add_section()
    for name, count, meaning in _survivors([e for e in kills if e.story.killed == "rank"]):
        row(name, count, meaning)
    table.add_section()
    resumed = sum(ending.story.resumed is not None for ending in endings)
    row("resumed from the newest commit", resumed, "found with latest_valid()")
    idle = sum(not ending.story.losses for ending in kills)
    row("killed before their first step", idle, "while starting or resuming")
    reasons = Counter(why for course in courses for _, why in course.skipped)
    row("checkpoints skipped", reasons.total())
    uncommitted = sum(count for why, count in reasons.items() if _UNCOMMITTED in why)
    for reason, count in [("killed before the commit", uncommitted), *reasons.most_common()]:
        if count and _UNCOMMITTED not in reason:
            row(f"  {reason}", count)
    table.add_section()
    trained = sum(course.num_trained for course in courses)
    row("losses compared, bit for bit", trained, "[green]all the same[/]")
    row("  of steps trained again", trained - sum(course.job.steps for course in courses))
    whole = sum(course.verified for course in courses)
    row("checkpoints left, read in full", whole, "[green]all whole[/]")
    row("committed checkpoints lost", 0, "looked after every life")
    return table


def _survivors(kills: Sequence[Ending]) -> list[tuple[str, int, str]]:
    codes = [code for ending in kills for code in ending.story.exit_codes if code >= 0]
    if not codes:
        return []
    errors = [error for ending in kills for error in ending.story.errors.values()]
    names = Counter(error.split(":")[0] for error in errors).most_common()
    rows = [("ranks that survived", len(codes), "none hung")]
    rows += [(f"  ended with {name}", count, _MEANINGS.get(name, "")) for name, count in names]
    return [*rows, ("  came to the last step", codes.count(0), "")] if codes.count(0) else rows


def draw_chaos(courses: Sequence[Course], path: Path) -> None:
    """Write a PNG: the losses on top of each other, and how the trainings got there.

    Args:
        courses: The undisturbed one, then those that were killed.
        path: Where to write.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, 1)
    _draw_losses(above, courses)
    _draw_lives(below, courses[1:])
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Axes, courses: Sequence[Course]) -> None:
    for number, course in enumerate(courses):
        losses = [float.fromhex(loss) for _, loss in sorted(course.losses.items())]
        label, style = "undisturbed", {"color": "0.8", "linewidth": 7.0}
        if number:
            label = f"{course.job.backend}, killed {len(course.kills)} times"
            style = {"linestyle": ("-", "--", "-.", ":")[number % 4], "linewidth": 1.4}
        axes.plot(sorted(course.losses), losses, label=label, **style)  # type: ignore[arg-type]
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.set_title("The losses of all trainings, on top of each other")
    axes.legend(frameon=False, fontsize=8)


def _draw_lives(axes: Axes, courses: Sequence[Course]) -> None:
    """Every life climbs from where it resumed to where it was killed."""
    trained = 0
    for number, course in enumerate(courses):
        for ending in course.endings:
            story, steps = ending.story, [step for step, _ in ending.story.losses]
            places = range(trained + 1, trained + len(steps) + 1)
            axes.plot(places, steps, color=f"C{number % 10}", linewidth=1.4)
            trained += len(steps)
            if story.killed is not None:
                height = steps[-1] if steps else story.resumed or 0
                axes.plot(trained, height, _VICTIMS[story.killed][2], color="tab:red")
    for what, _, mark in _VICTIMS.values():
        axes.plot([], [], mark, color="tab:red", label=f"{what} killed")
    axes.set(xlabel="steps trained, those trained again included", ylabel="step")
    axes.set_title("How they got there")
    axes.set_ylim(top=1.15 * max((course.job.steps for course in courses), default=1))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
