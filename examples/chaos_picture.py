"""The picture of chaos: the losses on top of each other, and how the training got there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chaos_course import Course

mpl.use("Agg")  # a machine without a screen will do

_MARKS = {
    "rank": ("x", "one rank killed"),
    "all": ("X", "all ranks killed"),
    "worker": ("+", "a worker killed, and what came of it"),
}


def draw_chaos(courses: Sequence[Course], path: Path) -> None:
    """Write a PNG.

    Args:
        courses: the undisturbed one, then those that were killed.
        path: of the picture.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, 1)
    _draw_losses(above, courses)
    _draw_lives(below, courses[1:])
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Axes, courses: Sequence[Course]) -> None:
    steps = sorted(courses[0].losses)
    smooth = [float.fromhex(courses[0].losses[step]) for step in steps]
    axes.plot(steps, smooth, color="0.8", linewidth=7, label="undisturbed")
    styles = ("-", "--", "-.", ":")
    for number, course in enumerate(courses[1:]):
        losses = [float.fromhex(course.losses[step]) for step in steps]
        label = f"{course.backend}, {course.worker}, killed {len(course.kills)} times"
        axes.plot(steps, losses, styles[number % len(styles)], linewidth=1.4, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.set_title("The losses of all trainings, on top of each other")
    axes.legend(frameon=False, fontsize=8)


def _draw_lives(axes: Axes, courses: Sequence[Course]) -> None:
    """Every life climbs from where it resumed to where it was killed."""
    trained = 0
    for number, course in enumerate(courses):
        color = f"C{number % 10}"
        for ending in course.endings:
            steps = [step for step, _ in ending.story.losses]
            places = range(trained + 1, trained + len(steps) + 1)
            axes.plot(places, steps, color=color, linewidth=1.4)
            trained += len(steps)
            if ending.story.killed is not None:
                height = steps[-1] if steps else ending.story.resumed or 0
                axes.plot(trained, height, _MARKS[ending.story.killed][0], color="tab:red")
    for mark, label in _MARKS.values():
        axes.plot([], [], mark, color="tab:red", label=label)
    axes.set_xlabel("steps trained, those trained again included")
    axes.set_ylabel("step")
    axes.set_title("How they got there")
    axes.set_ylim(top=1.15 * max((course.steps for course in courses), default=1))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
