"""Every interleaving of a few processes: each may stop, die and go on before each of its steps.

A process is a generator that yields what it does next and is sent the result. What a process is
about to do is known by where it stands and by its local variables, so that states which differ in
nothing but their past are looked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, NamedTuple

World = Mapping[str, Hashable]
"""What all processes share: files or objects, and locks. Never changed in place."""

Outcomes = Iterator[tuple[Any, World]]
"""The results that a step may have, each with the world after it. Without any, it has to wait."""


class Step(NamedTuple):
    """What a process does at once: its name, and what may come of it."""

    label: str
    act: Callable[[World], Outcomes]


Program = Generator[Step, Any, Any]
"""A process. What it returns is how it ends, for the invariants to look at."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a model.

    Attributes:
        start: Makes it anew; it must do the same whenever it gets the same results.
        may_die: Whether it may be killed before any step.
        on_death: What the system does then, such as to free its locks.
    """

    start: Callable[[], Program]
    may_die: bool = True
    on_death: Callable[[World], World] = lambda world: world


@dataclass(frozen=True, slots=True)
class Model:
    """Processes, the world in which they begin, and what must hold in each state.

    ``problem`` says what is wrong with a state, from the world and how each process ended: None
    while it runs, ``"dead"`` for one that was killed.
    """

    world: World
    processes: Mapping[str, Process]
    problem: Callable[[World, Mapping[str, Hashable]], str | None]


class _Point(NamedTuple):
    """Where a process stands: the results it was sent so far, and how it ended."""

    results: tuple[Any, ...] = ()
    end: Hashable = None


_State = tuple[frozenset[tuple[str, Hashable]], tuple[_Point, ...]]


@dataclass(slots=True)
class Explored:
    """What was seen.

    Attributes:
        states: Number of different states.
        steps: Number of steps between them.
        ends: How all processes ended together -> how often.
        problem: What was wrong in the first state that was; the shortest way leads to it.
        trace: (process, step) that lead there.
    """

    states: int = 0
    steps: int = 0
    ends: dict[tuple[Hashable, ...], int] = field(default_factory=dict)
    problem: str | None = None
    trace: Sequence[tuple[str, str]] = ()


def at(process: Process, results: Sequence[Any]) -> tuple[Step | None, Hashable, Hashable]:
    """The next step of a process, how it ended, and what tells where it stands."""
    program = process.start()
    try:
        step = next(program)
        for result in results:
            step = program.send(result)
    except StopIteration as stop:
        return None, stop.value, ("ended", stop.value)
    place: list[Hashable] = []
    inner: object = program
    while isinstance(inner, GeneratorType):
        frame = inner.gi_frame
        assert frame is not None
        place.append((frame.f_lasti, *sorted(frame.f_locals.items(), key=lambda item: item[0])))
        inner = inner.gi_yieldfrom
    return step, None, tuple(place)


def explore(model: Model, most_states: int = 5_000_000) -> Explored:
    """Visit every state that can be reached, nearest first, until one is wrong.

    Raises:
        MemoryError: If there are more states than ``most_states``.
    """
    names = [*model.processes]
    seen = Explored()
    places = dict[tuple[str, tuple[Any, ...]], tuple[Step | None, Hashable, Hashable]]()

    def place_of(name: str, point: _Point) -> tuple[Step | None, Hashable, Hashable]:
        if point.end is not None:
            return None, point.end, ("ended", point.end)
        key = name, point.results
        if key not in places:
            places[key] = at(model.processes[name], point.results)
        return places[key]

    # Of results that lead to one place, the first stand for all.
    first_at = dict[tuple[str, Hashable], _Point]()

    def settled(name: str, point: _Point) -> _Point:
        _, end, place = place_of(name, point)
        if end is not None:
            return _Point((), end)
        return first_at.setdefault((name, place), point)

    begin: _State = (
        frozenset(model.world.items()),
        tuple(settled(name, _Point()) for name in names),
    )
    cause = dict[_State, tuple[_State, str, str] | None]({begin: None})
    queue = deque([begin])
    while queue:
        state = queue.popleft()
        world, points = dict(state[0]), state[1]
        seen.states += 1
        if seen.states > most_states:
            raise MemoryError(f"more than {most_states} states")
        ends = {name: point.end for name, point in zip(names, points, strict=True)}
        seen.problem = model.problem(world, ends)
        if seen.problem is not None:
            back, trace = cause[state], list[tuple[str, str]]()
            while back is not None:
                trace.append(back[1:])
                back = cause[back[0]]
            seen.trace = trace[::-1]
            return seen
        if None not in ends.values():
            key = tuple(ends.values())
            seen.ends[key] = seen.ends.get(key, 0) + 1
        for number, (name, point) in enumerate(zip(names, points, strict=True)):
            step = place_of(name, point)[0]
            if step is None:
                continue
            after = [
                (step.label, new_world, settled(name, _Point((*point.results, result))))
                for result, new_world in step.act(world)
            ]
            process = model.processes[name]
            if process.may_die:
                after.append(("dies", process.on_death(world), _Point((), "dead")))
            for label, new_world, new in after:
                following: _State = (
                    frozenset(new_world.items()),
                    (*points[:number], new, *points[number + 1 :]),
                )
                seen.steps += 1
                if following not in cause:
                    cause[following] = state, name, label
                    queue.append(following)
    return seen


def shortest_way(explored: Explored) -> str:
    """The way to what is wrong, as a table."""
    lines = [f"{name:8} {label}" for name, label in explored.trace]
    return "\n".join([explored.problem or "nothing is wrong", *lines])


# Steps on files and objects -------------------------------------------------------------------


def read(name: str) -> Step:
    """The content; None without it."""
    return Step(f"reads {name}", lambda world: iter([(world.get(name), world)]))


def write(name: str, value: Hashable) -> Step:
    """Replace or create it as a whole."""
    return Step(f"writes {name} = {value}", lambda world: iter([(None, {**world, name: value})]))


def create(name: str, value: Hashable) -> Step:
    """Create it unless it is there; whether it was created."""

    def act(world: World) -> Outcomes:
        if name in world:
            yield False, world
        else:
            yield True, {**world, name: value}

    return Step(f"creates {name} = {value}", act)


def remove(name: str) -> Step:
    """Make sure that it is not there."""

    def act(world: World) -> Outcomes:
        yield None, {key: value for key, value in world.items() if key != name}

    return Step(f"removes {name}", act)


def names(prefix: str) -> Step:
    """The names below a prefix, sorted, without it."""

    def act(world: World) -> Outcomes:
        found = sorted(key.removeprefix(prefix) for key in world if key.startswith(prefix))
        yield tuple(found), world

    return Step(f"lists {prefix}", act)


def choose(label: str, *results: Hashable) -> Step:
    """Anything of these: what nobody can know beforehand."""
    return Step(label, lambda world: iter([(result, world) for result in results]))


def wait_for(name: str) -> Step:
    """Wait until it is there; its content."""
    return Step(
        f"waits for {name}",
        lambda world: iter([(world[name], world)] if name in world else []),
    )
