"""Plays a history in a simulated world, and looks at the run after each event."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

import torch

from dist_checkpointing import (
    CheckpointingException,
    CheckpointManager,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectPath,
    ObjectStoreOptions,
    Place,
    Retention,
    ShardedObject,
    ShardedTensor,
    StateMismatchError,
    load,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import RankFailedError
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.format.commit import data_folder
from dist_checkpointing.testing.simulation.scheduler import StuckError
from dist_checkpointing.testing.simulation.world import MEMORY, OWN, SHARED, Launch, World
from flipped_bits import FlippedBit
from histories import Event, History
from rivals import Rivals
from run_states import Oracle, ViolationError

ROWS: Final = 24
_PART_BYTES: Final = 100
_NOT_ALL_CHECKED: Final = ("metadata.json", ".distcp", ".lock", "/claims/", "/commits/")
"""In the paths of files of which some bytes mean nothing: what they hold counts, not each bit."""
_SETTLED_SECONDS: Final = 40.0
"""After which every machine sees what another one has done."""
_LONGEST_SECONDS: Final = 3000.0


def state_of(comm: Comm, value: int | None) -> dict[str, Any]:
    """What a rank saves, of which everything is one value; or a template."""
    number = -1 if value is None else value
    world_size, rank = comm.world_size, comm.rank
    rows = torch.full((ROWS // world_size, 2), float(number))
    # A flat tensor is one chunk of zarr 1, into which all ranks write.
    part = slice(ROWS * 2 * rank // world_size, ROWS * 2 * (rank + 1) // world_size)
    flat = torch.full((part.stop - part.start,), float(number))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world_size)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "optimizer.flat", flat, (ROWS, 2), flattened_range=part
        ),
        "object": ShardedObject("object", {"value": number}, (1,), (0,), replica_id=rank),
        "value": number,
    }


def value_of(loaded: Any) -> int:
    """The one value of a state that was loaded; ViolationError if it has several."""
    numbers = {*loaded["rows"].flatten().tolist(), *loaded["flat"].tolist()}
    numbers |= {float(loaded["value"]), float(loaded["object"]["value"])}
    if len(numbers) > 1:
        raise ViolationError(f"a load returned a mixture of the values {sorted(numbers)}")
    return int(numbers.pop())


Command = Callable[["_Rank"], Any]


@dataclass(eq=False)
class _Rank:
    """A rank of a training, with its manager."""

    comm: Comm
    manager: CheckpointManager | None = None


@dataclass(eq=False)
class _Training:
    """Ranks that carry out commands, one after the other.

    Attributes:
        results: What each rank has returned or raised, for each command.
        position: The step that it has come to.
        begun: Saves that it has begun, with the position of each.
        pending: The save that goes on in the background.
    """

    commands: list[Command] = field(default_factory=list)
    results: list[dict[int, Any]] = field(default_factory=list)
    launch: Launch | None = None
    position: int | None = None
    begun: list[tuple[tuple[int, int], int | None]] = field(default_factory=list)
    pending: tuple[int, int] | None = None
    is_disturbed: bool = False


class Player:
    """Plays a history in a world, and looks at the run after each event."""

    def __init__(self, world: World, history: History) -> None:
        self.world, self.history = world, history
        self.oracle = Oracle()
        self.values = count(1)
        self.seen: dict[tuple[int, frozenset[Any]], int] = {}
        self.looked: tuple[frozenset[Any], dict[int, int], int | None] | None = None
        self.training: _Training | None = None
        self.left: list[_Training] = []
        self.uncertain: list[tuple[tuple[int, int], int | None]] = []
        self.root = {"folder": f"{SHARED}/run"}.get(history.place, "s3://bucket/run")
        side = f"{SHARED}/rivals" if history.place == "folder" else "s3://bucket/rivals"
        self.rivals = Rivals(world, side, history.backend, state_of, value_of)
        world.shared.has_flock = history.has_flock
        world.store.is_bare = history.is_bare
        world.store.losses = 0.05 if history.is_lossy else 0.0
        world.store.late_seconds = 20.0 if history.is_lossy else 0.0

    def play(self) -> None:
        for event in self.history.events:
            self.world.note(str(event), "", "event")
            self.world.scheduler.random.seed(event.seed)
            self._play(event)
            self._check(is_settled=False)
        if self.training is not None:
            self._end(self.training)
        if self.left:
            self._pass(_LONGEST_SECONDS)  # whoever is frozen goes on, and comes to an end
            for training in self.left:
                assert training.launch is not None
                training.launch.end()
            self._check(is_settled=False)
            self.left = []
        self.history = replace(self.history, is_lossy=False, is_busy=False)
        self.world.store.losses = self.world.scheduler.stalls = 0.0
        self._pass(_SETTLED_SECONDS)
        self._begin(Event("launch", 0, self.history.machines))
        self._check(is_settled=True)
        self._save(Event("save", 0))
        self._check(is_settled=True)

    def _play(self, event: Event) -> None:
        if event.kind == "launch":
            if self.training is not None:
                self._end(self.training)
            self._begin(event)
            return
        of_world = {
            "power cut": self._cut_power,
            "clock": self._jump,
            "wait": lambda _: self._pass(10.0 ** self.world.scheduler.random.uniform(0, 3.5)),
            "rivals": self._let_rivals_save,
        }
        if event.kind in of_world:
            of_world[event.kind](event)
            return
        if self.training is None:
            self._begin(Event("launch", 0, max(1, self.history.machines)))
        if self.training is not None:
            self._finish_pending()
        if self.training is not None:
            {
                "save": self._save,
                "async save": self._save,
                "load": self._load,
                "roll back": self._roll_back,
                "remove": self._remove,
                "old save": self._save_old,
                "damage": self._damage,
            }[event.kind](event)

    def _cut_power(self, _: Event) -> None:
        dice, names = self.world.scheduler.random, [*self.world.machines]
        self.world.lose_power(dice.sample(names, dice.randint(1, len(names))))
        self._lose_memory()
        self._note_verified(None)
        if self.training is not None:
            self._end(self.training)

    def _lose_memory(self) -> None:
        """Allow that all steps are gone that were in memory: only what is loaded is looked at."""
        if self.history.has_memory:
            states = self.oracle.states
            self.oracle.move(states, [state.forgotten() for state in states])

    def _jump(self, _: Event) -> None:
        dice = self.world.scheduler.random
        machine = dice.choice([*self.world.machines.values()])
        machine.clock_error = dice.choice([-1, 1]) * 10.0 ** dice.uniform(0, 7)

    def _let_rivals_save(self, event: Event) -> None:
        history = self.history
        self._remove_lock_files()
        is_calm = not (history.is_busy or history.is_lossy or self.left)
        dice = self.world.scheduler.random
        self.rivals.save(dice, lambda: next(self.values), event.faults, calm=is_calm)
        if event.faults:  # which may have met the machines of the training
            self._note_verified(None)
            if self.training is not None:
                self._end(self.training)

    def _pass(self, seconds: float) -> None:
        self.world.scheduler.wait(lambda: False, seconds)

    def _remove_lock_files(self) -> None:
        """Remove, as people do, what locks nothing any more where there is no flock."""
        if not self.history.has_flock and not self.left:
            self.world.shared.remove(lambda name: name.startswith(".dckpt.lock"))

    def _begin(self, event: Event) -> None:
        """Start a training, which goes on from the newest step."""
        self._pass(_SETTLED_SECONDS)
        self._remove_lock_files()
        ranks = max(1, event.number)
        names = [*self.world.machines]
        if self.history.place == "fast":
            ranks = len(names) * (2 if ranks > 2 and len(names) != 3 else 1)
        else:
            self.world.scheduler.random.shuffle(names)
        training = _Training()
        history = self.history

        def resume(rank: _Rank) -> int | None:
            own = [f"{MEMORY}/run"] * history.has_memory + [f"{OWN}/run"]
            nearer = [
                Place(path, copies=0 if number else history.copies)
                for number, path in enumerate(own if history.place == "fast" else [])
            ]
            root: str | ObjectPath = self.root
            if history.has_parts:
                root = ObjectPath.of(self.root, ObjectStoreOptions(part_bytes=_PART_BYTES))
            rank.manager = CheckpointManager(
                [*nearer, Place(root)],
                history.backend,
                comm=rank.comm,
                retention=Retention(keep_last=history.keep_last),
                incremental=history.is_incremental and history.backend[0] != "torch_dist",
            )
            if not rank.manager.steps():
                return None
            try:
                return value_of(rank.manager.load(state_of(rank.comm, None)))
            except CheckpointNotFoundError:
                if rank.manager.latest() is not None:
                    raise
                return None  # what is left was abandoned

        def work(comm: Comm) -> None:
            rank = _Rank(comm)
            results: list[Any] = []
            while True:
                self.world.scheduler.wait(lambda: len(training.commands) > len(results))
                try:
                    results.append(training.commands[len(results)](rank))
                except Exception as error:  # noqa: BLE001 - it is what comes out
                    results.append(error)
                training.results[len(results) - 1][comm.rank] = results[-1]

        training.launch = self.world.start(ranks, work, machines=names)
        self.training = training
        results = self._command(event, resume)
        self._expect_commits()
        loaded = {value for value in results.values() if not isinstance(value, Exception)}
        if len(loaded) > 1:
            raise ViolationError(f"ranks have loaded different values: {loaded}")
        for value in loaded:
            newest = {save for state in self.oracle.states for save in state.newest}
            found = {save for save in newest if value == (None if save is None else save[1])}
            if not found:
                raise ViolationError(f"a training went on from value {value}, not from {newest}")
            self.oracle.move(state for state in self.oracle.states if found & state.newest)
            training.position = next((save[0] for save in found if save is not None), None)
            self.uncertain = []
        self._note_verified(training.position if loaded else None)

    def _command(self, event: Event, command: Command) -> dict[int, Any]:
        """What the ranks return or raise; the training is ended if one does not."""
        training = self.training
        assert training is not None
        assert training.launch is not None
        launch, results = training.launch, dict[int, Any]()
        training.results.append(results)
        training.is_disturbed |= bool(event.faults)
        self.world.arm(event.faults, launch)
        training.commands.append(command)
        is_in_time = self.world.wait_for(launch, results, _LONGEST_SECONDS)
        if event.kind != "async save":  # whose faults may come later
            self.world.arm(())
        if any(fault.kind == "power" for fault in event.faults):
            self._lose_memory()
            self._note_verified(None)
        if not is_in_time:
            raise ViolationError(f"{event} was not done after {_LONGEST_SECONDS:.0f} s")
        self._check_errors(event, results)
        is_whole = len(results) == len(launch.processes)
        if not is_whole or any(isinstance(r, Exception) for r in results.values()):
            self._end(training)
        return results

    def _check_errors(self, event: Event, results: dict[int, Any]) -> None:
        errors = [error for error in results.values() if isinstance(error, Exception)]
        for error in errors:
            if isinstance(error, ViolationError | StuckError):
                raise error
            if not isinstance(error, CheckpointingException | OSError):
                raise ViolationError(f"{event} raised {error!r}") from error
        kinds = {(type(error), str(error)) for error in errors}
        is_one = len(kinds) == 1 and len(errors) == len(results)
        if errors and not is_one and not any(isinstance(e, RankFailedError) for e in errors):
            raise ViolationError(f"{event} did not raise the same on all ranks: {results}")
        assert self.training is not None
        is_calm = not (self.training.is_disturbed or self.left)
        is_calm = is_calm and not (self.history.is_lossy or self.history.is_busy)
        if errors and is_calm and event.kind not in ("remove", "damage"):
            raise ViolationError(f"{event} failed: {errors[0]!r}") from errors[0]

    def _end(self, training: _Training) -> None:
        """End a training; ranks that are frozen go on later."""
        assert training.launch is not None
        for process in training.launch.processes:
            if process.frozen_until <= self.world.scheduler.now:
                process.die()
            elif not process.is_dead and training not in self.left:
                self.left.append(training)
        self.training = None

    def _finish_pending(self) -> None:
        training = self.training
        assert training is not None
        if training.pending is None:
            return
        save, training.pending = training.pending, None
        results = self._command(Event("wait for the async save", 0), lambda r: r.manager.wait())  # type: ignore[union-attr]
        if any(not isinstance(result, Exception) for result in results.values()):
            self.uncertain = []
            self.oracle.move(
                state
                if save in state.must
                else state.saved(save, training.begun[-1][1], self.history.keep_last)
                for state in self.oracle.states
            )

    def _save(self, event: Event) -> None:
        training = self.training
        assert training is not None
        dice = self.world.scheduler.random
        position = training.position
        overwrites = position is not None and dice.random() < 0.2
        ahead = 0 if overwrites else dice.choice([1, 1, 2])
        save = (0 if position is None else position) + ahead, next(self.values)
        is_async = event.kind == "async save"
        is_loaded = dice.random() < 0.3

        def command(rank: _Rank) -> None:
            manager = rank.manager
            assert manager is not None
            state = state_of(rank.comm, save[1])
            if is_async:
                manager.async_save(save[0], state, overwrite=overwrites)
                for name in ("rows", "flat"):  # the training goes on
                    state[name].data.fill_(-2.0)
                state["object"].data["value"] = -2
                return
            manager.save(save[0], state, overwrite=overwrites)
            if is_loaded and self._value_at(rank, save[0]) != save[1]:
                raise ViolationError(f"step {save[0]} does not hold what was saved")

        training.begun.append((save, position))
        before = self.oracle.states
        results = self._command(event, command)
        keep_last = self.history.keep_last
        after = [state.saved(save, position, keep_last) for state in before]
        is_done = any(not isinstance(result, Exception) for result in results.values())
        if is_done and not is_async:
            self.oracle.move(after)
        else:
            self.uncertain.append((save, position))
        if is_done:
            training.position = save[0]
            training.pending = save if is_async else None

    def _value_at(self, rank: _Rank, step: int) -> int:
        """The value of a step that was saved a moment ago."""
        assert rank.manager is not None
        try:
            return value_of(rank.manager.load(state_of(rank.comm, None), step))
        except (CorruptCheckpointError, StateMismatchError, RankFailedError):
            if not self.history.is_late:
                raise
            self._pass(_SETTLED_SECONDS)  # this machine does not see all of its files yet
            return value_of(rank.manager.load(state_of(rank.comm, None), step))

    def _chosen_step(self, event: Event) -> int | None:
        """The step of an event, counted from the newest; None if there is none."""
        steps = sorted({save[0] for state in self.oracle.states for save in state.must})
        return steps[-1 - min(event.number, len(steps) - 1)] if steps else None

    def _load(self, event: Event) -> None:
        training = self.training
        assert training is not None
        step = self._chosen_step(event)
        if step is None:
            return

        def command(rank: _Rank) -> int:
            assert rank.manager is not None
            return value_of(rank.manager.load(state_of(rank.comm, None), step))

        results = self._command(event, command)
        for value in {value for value in results.values() if not isinstance(value, Exception)}:
            if not any((step, value) in state.must | state.may for state in self.oracle.states):
                raise ViolationError(f"step {step} was loaded with value {value}")
            training.position = step

    def _save_old(self, event: Event) -> None:
        """Save a step that the run has passed, which must be refused."""
        training, dice = self.training, self.world.scheduler.random
        assert training is not None
        if training.position is None:
            return
        step, value = dice.randint(0, training.position), next(self.values)

        def command(rank: _Rank) -> str | None:
            assert rank.manager is not None
            try:
                rank.manager.save(step, state_of(rank.comm, value))
            except RankFailedError:
                raise
            except CheckpointingException as error:
                return str(error)
            return None

        results = self._command(event, command)
        if None in results.values():
            raise ViolationError(f"step {step} was saved after step {training.position}")

    def _damage(self, event: Event) -> None:
        """Flip a bit of a step, which a verified load must not return, nor ``latest_valid``."""
        known = {save for state in self.oracle.states for save in state.must}
        steps = sorted(step for step, _ in known)
        if not steps or self.history.place == "fast":
            return
        dice = self.world.scheduler.random
        step = steps[-1 - min(event.number, len(steps) - 1)]
        flipped = FlippedBit.chosen(self.world, f"run/step-{step:08d}/", dice)
        if flipped is None:
            return
        losses, self.world.store.losses = self.world.store.losses, 0.0
        flipped.flip()
        path = f"{self.root}/step-{step:08d}"

        def look(comm: Comm) -> int | None:
            try:
                return value_of(load(state_of(comm, None), path, comm=comm, verify=True))
            except RankFailedError:
                raise
            except CheckpointingException:
                return None

        value = self.world.launch(1, look, name="reader").results[0]
        if isinstance(value, Exception):
            raise ViolationError(f"{flipped.path} was damaged: {value!r}") from value
        if value is not None and (step, value) not in known:
            raise ViolationError(f"{flipped.path} was damaged, and {value} was loaded")

        def command(rank: _Rank) -> tuple[int | None, int | None]:
            assert rank.manager is not None
            valid = rank.manager.latest_valid()
            try:
                return valid, value_of(rank.manager.load(state_of(rank.comm, None)))
            except CheckpointNotFoundError:
                return valid, None

        results = self._command(event, command)
        flipped.flip()
        self.world.store.losses = losses
        given = {r for r in results.values() if not isinstance(r, Exception)}
        valid = {step for step, _ in given}
        values = {save[1] for state in self.oracle.states for save in state.must | state.may}
        if not {value for _, value in given} <= {*values, None}:
            raise ViolationError(f"{flipped.path} was damaged, and {given} was loaded")
        is_found = value is None or not any(part in flipped.path for part in _NOT_ALL_CHECKED)
        if is_found and step in valid and self._is_part_of(flipped.path, path):
            raise ViolationError(f"{flipped.path} was damaged, and step {step} is said to be valid")
        self._note_verified(valid.pop() if len(valid) == 1 else None)
        if self.training is not None:
            self._end(self.training)

    def _is_part_of(self, path: str, checkpoint: str) -> bool:
        """Whether a file is not one that a replaced save has left."""
        found = self.world.launch(1, lambda _: data_folder(as_location(checkpoint)), name="reader")
        return path.startswith(str(found.results[0]))

    def _note_verified(self, step: int | None) -> None:
        """Note that a step was verified; None if it is not known which are."""
        # Who goes on later may delete what it does not know to be verified.
        step = None if self.left else step
        self.oracle.move(state.with_verified(step) for state in self.oracle.states)

    def _roll_back(self, event: Event) -> None:
        """Load an older step, and save what grows from it."""
        self._load(Event("load", event.seed, 1 + event.number))
        if self.training is not None:
            self._save(event)

    def _remove(self, event: Event) -> None:
        step = self._chosen_step(event)
        if step is None:
            return

        def command(rank: _Rank) -> None:
            assert rank.manager is not None
            rank.comm.from_rank0("removing", lambda: rank.manager.delete(step))  # type: ignore[union-attr]

        before = self.oracle.states
        results = self._command(event, command)
        removed = [state.removed(step) for state in before]
        is_done = any(not isinstance(result, Exception) for result in results.values())
        if is_done:
            self.oracle.move(removed)
        else:
            self.oracle.move(before, removed, [state.half_removed(step) for state in before])

    def _check(self, *, is_settled: bool) -> None:
        """Look at the run as a reader on some machine does, if anything has changed."""
        self._expect_commits()
        self._pass(_SETTLED_SECONDS)
        files = self._files()
        if self.looked is None or self.looked[0] != files:
            self.looked = files, *self._look()
        _, found, latest = self.looked
        if self.history.place != "fast":  # steps may be on the disks alone
            steps: dict[int | None, int] = {value: step for step, value in found.items()}
            self.oracle.check(
                found,
                steps.get(latest),
                is_settled=is_settled,
                # In a store, the next start may have a commit to finish.
                knows_latest=is_settled or (self.history.place == "folder" and not self.left),
                aside=set() if is_settled else self._set_aside(),
            )

    def _look(self) -> tuple[dict[int, int], int | None]:
        """The value of each step that can be loaded, and that of the latest."""

        def look(comm: Comm) -> tuple[dict[int, int], int | None]:
            for step, files in self._steps().items():
                if (step, files) not in self.seen:
                    with suppress(CheckpointNotFoundError):  # it may be seen later
                        template = state_of(comm, None)
                        path = f"{self.root}/step-{step:08d}"
                        loaded = load(template, path, comm=comm, verify=True)
                        self.seen[step, files] = value_of(loaded)
            steps = self._steps().items()
            found = {step: self.seen[step, f] for step, f in steps if (step, f) in self.seen}
            with suppress(CheckpointNotFoundError):
                # Its tensors were loaded above.
                return found, load({}, f"{self.root}@latest", comm=comm)["value"]
            return found, None

        losses, self.world.store.losses = self.world.store.losses, 0.0
        machine = self.world.scheduler.random.choice([*self.world.machines])
        result = self.world.launch(1, look, name="reader", machines=[machine]).results[0]
        if isinstance(result, CorruptCheckpointError) and self.history.is_late:
            # What was frozen may just have committed files that this machine does not see yet.
            self._pass(_SETTLED_SECONDS)
            result = self.world.launch(1, look, name="reader", machines=[machine]).results[0]
        self.world.store.losses = losses
        if isinstance(result, Exception):
            raise ViolationError(f"a reader failed: {result!r}") from result
        found, latest = result
        return found, latest

    def _expect_commits(self) -> None:
        """Saves that go on, or that the next training finishes, may have committed by now."""
        frozen = [save for training in self.left for save in training.begun[-1:]]
        for save, position in [*frozen, *self.uncertain]:
            states = self.oracle.states
            keep = self.history.keep_last
            after = [s.saved(save, position, keep) for s in states if save not in s.must]
            # What a save replaces by itself comes back; where it overwrites, the old one has ended.
            is_back = save[0] != position and not (self.left or self.history.is_late)
            is_back = is_back and self.history.place != "fast"
            is_frozen = (save, position) in frozen
            cut_off = [s.left(save) if is_frozen else s.interrupted(save, is_back) for s in states]
            self.oracle.move(states, after, cut_off)

    def _set_aside(self) -> set[int]:
        """The steps that a save was about to replace, and has set aside."""
        paths = (path for path, _ in self.world.shared.tree())
        names = (re.search(r"/step-(\d{8})\.replaced$", path) for path in paths)
        return {int(match[1]) for match in names if match is not None}

    def _files(self) -> frozenset[tuple[str, Any]]:
        """Every file of the run, and what tells whether it has changed."""
        files: list[tuple[str, Any]] = [*self.world.store.etags("s3://bucket").items()]
        if self.history.place == "folder":
            tree = self.world.shared.tree()
            files = [(path, (inode.number, inode.changed)) for path, inode in tree]
        return frozenset(file for file in files if "/beats/" not in file[0])

    def _steps(self) -> dict[int, frozenset[Any]]:
        """The folders of steps, and the files in each."""
        steps = dict[int, set[Any]]()
        for file in self._files():
            match = re.search(r"\brun/step-(\d{8})/", file[0])
            if match is not None:
                steps.setdefault(int(match[1]), set()).add(file)
        return {step: frozenset(marks) for step, marks in sorted(steps.items())}


@dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong in a history, and what was done until then."""

    history: History
    error: Exception
    world: World


def play(history: History, *, keeps_log: bool = False) -> Failure | World:
    """Play a history; what was found wrong, or the world in which all went well."""
    world = World(
        history.seed,
        machines=history.machines,
        late_seconds=15.0 if history.is_late else 0.0,
        changes=history.changes,
        stalls=0.001 if history.is_busy else 0.0,
        shorts=0.05,
        keeps_log=keeps_log,
    )
    try:
        world.run(Player(world, history).play)
    except (ViolationError, StuckError) as error:
        return Failure(history, error, world)
    return world


def shortest(history: History) -> History:
    """The shortest history that fails, found by leaving out of one that fails what can be."""
    while True:
        failing = (h for h in history.shorter() if isinstance(play(h), Failure))
        found = next(failing, None)
        if found is None:
            return history
        history = found
