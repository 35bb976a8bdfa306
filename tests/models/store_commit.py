"""The commit in an object store: claims, outcomes that are put once, data below a name of its own.

What is left out: heartbeats (a live process may look dead at any time, a dead one never alive),
several objects of one kind, and half answers of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from explorer import Model, Outcomes, Process, Program, Step, World, create, names, read, write

META = "metadata.json"
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Faults:
    """What is left out of the protocol, to see that the model finds it."""

    commit_is_replaced: bool = False
    clears_before_ending: bool = False
    lists_data_after_claim: bool = False
    without_second_list: bool = False
    commits_without_claim: bool = False
    removes_last_commit_first: bool = False
    without_fences: bool = False
    removes_what_was_listed: bool = False
    rolls_on_unasked: bool = False


def _claim(number: int) -> str:
    return f"claims/{number}"


def _outcome(number: int) -> str:
    return f"commits/{number}"


def _data(attempt: str) -> str:
    return f"data/{attempt}"


def _numbers(found: Sequence[str], kind: str) -> Numbers:
    below = [name.removeprefix(kind) for name in found if name.startswith(kind)]
    return tuple(sorted(map(int, below)))


def _listed(label: str, *below: str) -> Step:
    """The names of objects, and what tells a commit from another of its name."""

    def act(world: World) -> Outcomes:
        stored = {name: value for name, value in world.items() if name.startswith(below)}
        marks = tuple(sorted((n, str(v)) for n, v in stored.items() if n.startswith("commits/")))
        yield (tuple(sorted(stored)), marks), world

    return Step(label, act)


def _list_all() -> Step:
    return _listed("lists all", "claims/", "commits/", "data/", META)


def _list_claims() -> Step:
    return _listed("lists claims", "claims/", "commits/")


def _list_folder() -> Step:
    """What is there at all."""

    def act(world: World) -> Outcomes:
        kinds = {"claims/": "claims/", "commits/": "claims/", "data/": "data/", META: META}
        yield (
            tuple(there for kind, there in kinds.items() if any(n.startswith(kind) for n in world)),
            world,
        )

    return Step("lists the folder", act)


def _numbered(found: Sequence[str]) -> Numbers:
    """The numbers of commits by their names."""
    return tuple(sorted(map(int, found)))


def _delete(*gone: str) -> Step:
    def act(world: World) -> Outcomes:
        left = {name: value for name, value in world.items() if name not in gone}
        if left.get("-last") in gone:
            del left["-last"]
        yield None, left

    return Step(f"deletes {', '.join(sorted(gone))}", act)


def _watch(number: int) -> Step:
    """Whether the holder of a claim is dead, or was stopped for so long that it seems to be."""

    def act(world: World) -> Outcomes:
        holder = world.get(_claim(number))
        yield True, world
        if holder is not None and f"-dead/{holder}" not in world:
            yield False, world

    return Step(f"watches the holder of claim {number}", act)


def _decided(number: int, outcome: tuple[str, str], faults: Faults) -> Program:
    """Say what becomes of a claim unless that was said; what is true then."""

    def act(world: World) -> Outcomes:
        name = _outcome(number)
        if name in world and not faults.commit_is_replaced:
            yield False, world
            return
        after = {**world, name: outcome}
        if outcome[0] == "attempt":
            # For the invariants: the newest that has committed.
            after["-last"] = name
            after[f"-committed/{outcome[1]}"] = True
        yield True, after

    while True:
        if (yield Step(f"puts {_outcome(number)} = {' '.join(outcome)}", act)):
            return outcome
        stored = yield read(_outcome(number))
        if stored is not None:
            return stored


def _acquired(me: str, numbers: Numbers, decided: Numbers, faults: Faults) -> Program:
    """Claim the prefix: the number, and what was listed right after; None if it is refused."""
    undecided = tuple(n for n in numbers if n not in decided)
    if undecided and undecided[-1] == numbers[-1] and not (yield _watch(numbers[-1])):
        return None
    number = max((0, *numbers, *decided)) + 1
    for earlier in undecided:
        yield from _decided(earlier, ("ended", me), faults)
    while not (yield create(_claim(number), me)):
        if (yield read(_claim(number))) is not None:
            return None
    if faults.without_second_list:
        return number, (), ()
    found, marks = yield _list_claims()
    if number in _numbers(found, "commits/"):
        return None
    later = _numbers(found, "commits/")
    if any(n < number and n not in later for n in _numbers(found, "claims/")):
        yield from _decided(number, ("ended", me), faults)
        return None
    return number, found, marks


def saving(me: str, *, overwrite: bool, faults: Faults) -> Callable[[], Program]:
    """A save."""

    def program() -> Program:
        looked = yield from _looked(overwrite)
        if looked is None:
            return "refused"
        there, data, found = looked
        held = yield from _acquired(
            me, _numbers(found, "claims/"), _numbers(found, "commits/"), faults
        )
        if held is None:
            return "refused"
        number, found, _ = held
        if faults.lists_data_after_claim:
            data = yield names("data/")
        commit = yield from _newest(_numbers(found, "commits/"))
        may_write = yield from _rolled_on(me, number, commit, faults)
        if may_write and ((commit and not overwrite) or (not commit and META in there)):
            may_write = (yield from _looked(overwrite, is_first=False)) is not None
        if not may_write:
            yield from _decided(number, ("ended", me), faults)
            return "refused"
        yield write(_data(me), me)
        for attempt in data:
            if attempt != commit:
                yield _delete(_data(attempt))
        if faults.clears_before_ending and commit:
            yield _delete(_data(commit))
        if not (yield from _committed(me, number, faults)):
            if (yield from _decided(number, ("ended", me), faults)) != ("attempt", me):
                yield _delete(_data(me))
            return "lost"
        yield write(META, me)
        if commit:
            yield _delete(_data(commit))
        return "committed"

    return program


def _looked(overwrite: bool, *, is_first: bool = True) -> Program:
    """What is there, the attempts with data and the claims; None if it must not be saved over."""
    there = yield _list_folder()
    if META in there and (yield read(META)) is not None:
        # Without a commit nothing says which files are ours.
        is_ours = (
            overwrite and (yield from _newest(_numbered((yield names("commits/"))))) is not None
        )
        if not is_ours:
            return None
    if not is_first:
        return there, (), ()
    # Before the claims are read: a save claims first, then writes.
    data = (yield names("data/")) if "data/" in there else ()
    found = (yield _list_claims())[0] if "claims/" in there else ()
    return there, data, found


def _rolled_on(me: str, number: int, commit: str | None, faults: Faults) -> Program:
    """Put the `metadata.json` of a commit that was cut off; False if the claim is lost."""
    if commit is not None and (yield read(META)) is None:
        if not faults.rolls_on_unasked and not (yield from _is_held(me, number)):
            return False
        yield write(META, commit)
    return True


def _committed(me: str, number: int, faults: Faults) -> Program:
    """Whether what becomes of the claim is that its holder has committed."""
    if not faults.commits_without_claim and (yield read(_claim(number))) != me:
        return False
    return (yield from _decided(number, ("attempt", me), faults)) == ("attempt", me)


def _is_held(me: str, number: int) -> Program:
    """Whether no other process has ended the claim, or removed all."""
    if (yield read(_claim(number))) != me:
        return False
    return (yield read(_outcome(number))) is None


def _newest(decided: Numbers) -> Program:
    """The attempt that is the checkpoint."""
    for number in decided[::-1]:
        outcome = yield read(_outcome(number))
        if outcome is not None and outcome[0] == "attempt":
            return outcome[1]
    return None


def removing(me: str, faults: Faults) -> Callable[[], Program]:
    """A removal of all."""

    def program() -> Program:
        found, marks = yield _list_all()
        numbers, decided = _numbers(found, "claims/"), _numbers(found, "commits/")
        if not numbers:
            return "nothing there"
        some, last = yield from _commits_in_order(numbers, decided, faults)
        held = yield from _acquired(me, numbers, decided, faults)
        if held is None:
            return "refused"
        number, later, later_marks = held
        if later_marks != marks and not faults.removes_what_was_listed:
            decided = _numbers(later, "commits/")
            some, last = yield from _commits_in_order(_numbers(later, "claims/"), decided, faults)
            found, _ = yield _list_all()
            if not (yield from _is_held(me, number)):
                yield from _decided(number, ("ended", me), faults)
                return "lost"
        yield _delete(META)
        order = (last, some) if faults.removes_last_commit_first else (some, last)
        for commits in order:
            if commits:
                yield _delete(*map(_outcome, commits))
        earlier = tuple(_claim(n) for n in _numbers(later, "claims/") if n < number)
        if gone := (*(n for n in found if n.startswith("data/")), *earlier):
            yield _delete(*gone)
        yield _delete(_claim(number))
        return "removed"

    return program


def _commits_in_order(numbers: Numbers, decided: Numbers, faults: Faults) -> Program:
    """The outcomes to delete first, and the one of the checkpoint, without fences."""
    last: Numbers = ()
    fences: Numbers = ()
    for number in decided:
        outcome = yield read(_outcome(number))
        if outcome is not None and outcome[0] == "attempt":
            last = (number,)
        elif outcome is not None and not faults.without_fences:
            claim = (yield read(_claim(number))) if number in numbers else None
            if claim is None or claim != outcome[1]:
                # Its holder may only have been stopped.
                fences = (*fences, number)
    some = tuple(n for n in decided if n not in last and n not in fences)
    return some, last


def reading() -> Callable[[], Program]:
    """A load: the save whose values it returns, or why it fails."""

    def program() -> Program:
        decided = yield names("commits/")
        attempt = yield from _newest(_numbered(decided))
        if attempt is None or (yield read(META)) is None:
            return "no checkpoint"
        value = yield read(_data(attempt))
        return "missing objects" if value is None else ("read", attempt, value)

    return program


def _dead(me: str) -> Callable[[World], World]:
    return lambda world: {**world, f"-dead/{me}": True}


def _problem(*, may_be_replaced: bool) -> Callable[[World, Mapping[str, Hashable]], str | None]:
    def problem(world: World, ends: Mapping[str, Hashable]) -> str | None:
        commits = {
            int(name.removeprefix("commits/")): outcome[1]
            for name, outcome in world.items()
            if name.startswith("commits/")
            and isinstance(outcome, tuple)
            and outcome[0] == "attempt"
        }
        newest = max(commits, default=None)
        if newest is not None:
            if META in world and _data(commits[newest]) not in world:
                return f"the checkpoint {commits[newest]} has lost its data"
            if world.get("-last") != _outcome(newest):
                return f"{_outcome(newest)} came to light again after {world.get('-last')}"
        winners = [name for name, end in ends.items() if end == "committed"]
        if not may_be_replaced and len(winners) > 1:
            return f"two saves have committed: {winners}"
        if not may_be_replaced and winners and (newest is None or commits[newest] != winners[0]):
            return f"what {winners[0]} has committed is gone"
        for name, end in ends.items():
            if isinstance(end, tuple) and f"-committed/{end[1]}" not in world:
                return f"{name} has read what {end[1]} has not committed"
        return None

    return problem


def store_model(
    saves: Sequence[str],
    *,
    overwrite: bool,
    removals: Sequence[str] = (),
    faults: Faults = Faults(),
) -> Model:
    """Saves and removals that begin at any time, and a reader."""
    processes = {
        me: Process(saving(me, overwrite=overwrite, faults=faults), on_death=_dead(me))
        for me in saves
    }
    processes |= {me: Process(removing(me, faults), on_death=_dead(me)) for me in removals}
    processes["reader"] = Process(reading(), may_die=False)
    return Model({}, processes, _problem(may_be_replaced=overwrite or bool(removals)))
