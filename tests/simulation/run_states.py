"""What a run must hold after each event: a plain model of a training that saves.

A save that was interrupted has committed or not, and nobody may know. So there are several states
that a run can be in, and each look at it leaves those that it fits; none is left if it is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

Saved = tuple[int, int]
"""A step and the value that everything in it has."""


class ViolationError(Exception):
    """A run is not as it must be."""


@dataclass(frozen=True, slots=True)
class State:
    """What a run can be.

    Attributes:
        line: The saves that the newest one has grown from, and itself, oldest first.
        must: Saves that can be loaded.
        may: Saves that can be loaded, or are gone.
        verified: Saves that were read back and compared; retention keeps the newest of the line.
    """

    line: tuple[Saved, ...] = ()
    must: frozenset[Saved] = frozenset()
    may: frozenset[Saved] = frozenset()
    verified: frozenset[Saved] = frozenset()

    def saved(self, save: Saved, position: int | None, keep_last: int | None) -> State:
        """After a save has committed, of a training that had come to ``position``."""
        # Of two saves of one step the later one is there.
        older = (old for old in self.line if position is not None and old[0] <= position)
        line = (*(old for old in older if old[0] != save[0]), save)
        must = {old for old in self.must if old[0] != save[0]} | {save}
        may = {old for old in self.may if old[0] != save[0]}
        kept = {*(line if keep_last is None else line[-keep_last:])}
        verified = frozenset(old for old in self.verified if old[0] != save[0])
        kept |= {*[old for old in line if old in verified][-1:]}
        return State(line, frozenset(must & kept), frozenset(may | (must - kept)), verified)

    def left(self, save: Saved) -> State:
        """After a save has ended, in whatever way, when others had gone on."""
        state = self.interrupted(save)
        return replace(state, may=state.may | {save})

    def interrupted(self, save: Saved, is_back: bool = False) -> State:
        """After a save was cut off before its commit was durable.

        Another save of this step is set aside until the next training begins; then it ``is_back``,
        or may have ended.
        """
        aside = {old for old in self.must if old == save or (old[0] == save[0] and not is_back)}
        return replace(self, must=self.must - aside, may=self.may | aside)

    def forgotten(self) -> State:
        """After everything that the run holds may be gone."""
        return replace(self, must=frozenset(), may=self.may | self.must)

    def gone_back(self, position: int) -> State:
        return replace(self, line=tuple(old for old in self.line if old[0] <= position))

    def removed(self, step: int) -> State:
        def others(saves: Iterable[Saved]) -> frozenset[Saved]:
            return frozenset(save for save in saves if save[0] != step)

        line = tuple(save for save in self.line if save[0] != step)
        return State(line, others(self.must), others(self.may), others(self.verified))

    def half_removed(self, step: int) -> State:
        """After a removal was cut off: the step is there again if the next start completes it."""
        gone = frozenset(save for save in self.must if save[0] == step)
        return replace(self, must=self.must - gone, may=self.may | gone)

    def with_verified(self, step: int | None) -> State:
        """After a step was verified; None if it is not known what is noted as verified."""
        if step is None:
            return replace(self, verified=frozenset())
        return replace(self, verified=self.verified | {s for s in self.line if s[0] == step})

    @property
    def newest(self) -> set[Saved | None]:
        """What a training may go on from: the newest save of its line that is there."""
        found = set[Saved | None]()
        for save in reversed(self.line):
            if save in self.must:
                return found | {save}
            if save in self.may:
                found.add(save)
        return found | {None}

    def problem(
        self,
        found: Mapping[int, int],
        latest: int | None,
        *,
        knows_latest: bool,
        aside: Collection[int] = (),
    ) -> str:
        """What does not fit what was found: steps with their values; empty if all does.

        Steps that lie ``aside`` come back with the next start, if their replacement was cut off.
        """
        for step, value in sorted(found.items()):
            if (step, value) not in self.must | self.may:
                known = sorted(self.must | self.may)
                return f"step {step} holds value {value}, where only {known} were committed"
        for step, value in sorted(self.must):
            if found.get(step) != value and (step in found or step not in aside):
                return f"step {step} with value {value} is lost; found {dict(found)}"
        newest = next((s for s, v in reversed(self.line) if found.get(s) == v), None)
        if knows_latest and newest is not None and latest != newest:
            return f"the latest step is {latest}, not {newest} of {self.line}"
        return ""


@dataclass
class Oracle:
    """The states that a run can be in."""

    states: frozenset[State] = frozenset({State()})

    def move(self, *choices: Collection[State] | Iterable[State]) -> None:
        self.states = frozenset(state for choice in choices for state in choice)

    def check(
        self,
        found: Mapping[int, int],
        latest: int | None,
        *,
        is_settled: bool,
        knows_latest: bool,
        aside: Collection[int] = (),
    ) -> None:
        """Keep the states that fit what was found.

        A run is settled after a save or the start of a training, and has no old commit to finish.

        Raises:
            ViolationError: if none does.
        """
        problems = {
            state: state.problem(found, latest, knows_latest=knows_latest, aside=aside)
            for state in self.states
        }
        fitting = [state for state, problem in problems.items() if not problem]
        if not fitting:
            raise ViolationError("; or ".join(sorted({*problems.values()})))
        # What is not settled may come to light again: the next training finishes old commits.
        self.states = frozenset(_known(s, found) if is_settled else s for s in fitting)


def _known(state: State, found: Mapping[int, int]) -> State:
    """A state, of which is known now what is there."""
    return replace(state, may=state.may & frozenset(found.items()))
