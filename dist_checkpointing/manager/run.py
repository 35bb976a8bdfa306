"""The checkpoints of a run: in its last place alone, or first on the disks of its machines."""

from __future__ import annotations

import logging
import math
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, SupportsFloat

from dist_checkpointing.comm import Comm, Outcome
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.location import check_room, relative
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import data_folder, is_committed, tolerant
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PARTS_NAME, leftovers, number_of_save
from dist_checkpointing.format.run_steps import NO_STEP, RunRecord, latest_step
from dist_checkpointing.format.seal import Seal, read_seal
from dist_checkpointing.manager.copies import Copier
from dist_checkpointing.manager.disks import FastDisks, MachineFolders, whole_steps
from dist_checkpointing.manager.peer_files import fetch_for_load
from dist_checkpointing.manager.places import Place
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.manager.save_log import Hooks, Stopwatch, call_hooks
from dist_checkpointing.mapping.objects_and_factories import as_state_dict
from dist_checkpointing.serialization.save_folder import Disks, SaveHooks

logger: logging.Logger = logging.getLogger(__name__)
_TRIES_OF_DISKS: Final = 3


class NoRoomError(CheckpointingException):
    """A place that is not the last one has no room for a step."""


class Run:
    """The checkpoints of one run, as one rank has them.

    A step goes to the nearest place that takes it, and is copied from there to those behind it that
    do: into the last one as a whole, or not at all. Retention holds in each; a disk also keeps what
    is not in the last place yet, and a nearer one what is not further on the same machine. If not
    all ranks share a disk, each has the part of a step that its ranks wrote; a load fetches to it
    what its ranks ask for. Rank 0 knows which steps the disks hold together.

    Only rank 0 may call methods that are not collective and change files.

    Making one is collective if there are disks. It goes on with what the last manager left.
    ``on_saved`` is called with each save. A save goes on from ``position``, the step that was
    loaded or saved last; NO_STEP if a history begins, None for the latest. It is known on rank 0.
    """

    def __init__(
        self, places: Sequence[Place], on_saved: Hooks, comm: Comm, *, incremental: bool
    ) -> None:
        self._places, self._comm = places, comm
        home: Any = places[-1]
        self.root: Location = home.path
        self._retention = home.retention
        self._on_saved, self._is_incremental = on_saved, incremental
        self.position: int | None = None
        self.damaged: set[int] = set()  # a save does not go on from them
        self._skipped: Counter[int] = Counter()
        self._damage: dict[int, list[str]] = {}  # on this disk: what findings of loads say where
        self._home = RunFolder(home.path, home.retention)
        self.near: RunFolder = self._home
        self._folders = [self.near]
        self._copier: Copier | None = None
        self._has_disks, self._num_disks, self._leads = len(places) > 1, 1, comm.rank == 0
        self._disks: FastDisks | None = None
        self._has_parts = False  # the steps on a disk may be parts of checkpoints
        if comm.rank == 0:
            self._home.finish_commits()
        self._machine = MachineFolders([self.near])
        if self._has_disks:
            self._use_disks(places[:-1])

    def _use_disks(self, places: Sequence[Any]) -> None:
        """Go on with what the last manager has left on the disks. Collective."""
        folders = [
            RunFolder(p.path, p.retention, partial(self._kept, n + 1)) for n, p in enumerate(places)
        ]
        self.near = near = folders[0]
        self._folders, self._machine = [*folders, self._home], MachineFolders(folders)
        disks, *others = (FastDisks(self._comm, place.path) for place in places)
        if any(other.leader_of_rank != disks.leader_of_rank for other in others):
            finding = Finding(
                "all places but the last one must be shared by the same ranks",
                found=", ".join(disks.names),
                remedy="Leave out the one that more ranks share, or make it the last one.",
            )
            raise UnsupportedFormatError("a run cannot be kept in these places", [finding])
        self._num_disks, self._leads = len(disks.leaders), disks.leads
        self._has_parts = disks.are_many or self._comm.from_rank0(
            "looking for parts that other machines have left",
            lambda: any(
                PARTS_NAME in leftovers(path)
                for step in self._machine.steps()
                for path in self._machine.paths(step)
            ),
        )
        if self._has_parts and self._is_incremental:
            finding = Finding(
                "incremental=True shares files of a checkpoint that is whole on one disk",
                found=", ".join(disks.names),
                remedy="Leave incremental=True out, or pass a folder that all ranks share and "
                "that holds no parts of what more machines have saved.",
            )
            raise UnsupportedFormatError("not all ranks share a disk", [finding])
        what = "agreeing on the history"

        def last_record() -> RunRecord | None:
            for folder in folders[1:] if disks.leads else ():
                folder.finish_replacing()
                near.catch_up_with(folder.record())  # it may be on a disk that is lost at a restart
                folder.go_back_with(near.record())
            return near.record() if disks.leads else None

        records = self._comm.to_rank0(what, last_record)
        with self._comm.agreed(what):
            if self._comm.rank == 0:
                for folder in folders:
                    folder.finish_commits()
                self._agree_on_history(records)
        machine = self._machine
        whole = whole_steps(self._comm, disks, machine, self._home, has_parts=self._has_parts)
        self._disks = disks
        self._copier = Copier(self._comm, machine, self._home, disks, self._places, whole)
        is_one_machine = len({*disks.machines}) == 1 < len(disks.leaders)
        if places[0].copies and is_one_machine and self._comm.rank == 0:
            logger.warning("all disks are on %s: no copies are made", disks.machines[0])

    @property
    def _pending(self) -> Mapping[int, str]:
        """The steps that are not in the last place yet, and their saves."""
        return {} if self._copier is None else self._copier.pending

    def _kept(self, number: int) -> set[int]:
        """The steps that a folder must keep until folder ``number`` or the last place has them."""
        further = self._machine.folders[number:]
        unsent = self._copier.unsent if self._copier else ()
        is_further = (
            step for step in self._pending if any(is_committed(f.folder(step)) for f in further)
        )
        return {*self._pending}.difference(is_further).union(unsent)

    def _agree_on_history(self, records: Sequence[RunRecord | None]) -> None:
        """Let disk and store go back where the run has, and only the other one knows.

        The disk of rank 0 may be new, or have been away: others know where the run has come to.
        """
        for record in filter(None, records):
            self.near.catch_up_with(record)
        near, home = self.near.record(), self._home.record()
        if near.has_abandoned([s for s in home.steps if s == home.latest], home):
            self._home.go_back_with(near)
        elif home.has_abandoned(near.history(near.steps), near):
            # Another machine has gone back while this disk was away, or had not been copied.
            self.near.go_back_with(home)

    def best_place(self, step: int) -> Path:
        """Where a step is: on the disk, or in the last place if all of it is there alone."""
        local, stored = self._machine.folder(step), self._home.folder(step)
        if not self._has_disks or step in self._pending or not is_committed(stored):
            return local
        if self._has_parts or step in self.damaged or not is_committed(local):
            return stored
        # Another one there was saved by another machine while this disk was away.
        is_same = number_of_save(local) == number_of_save(data_folder(stored)) != 0
        return local if is_same else stored

    def prepare_read(self, step: int, wanted: Any = None, *, near: bool = True) -> Path:
        """Where all ranks can read a step; copies it to the last place if it must. Collective.

        Where machines have parts of it, each rank can read on its disk what is ``wanted`` (a
        template), unless ``near`` is False: what its disk has not is fetched.
        """
        if not self._has_parts:
            # Only rank 0 knows what is to be copied.
            is_near = not self._has_disks or self._comm.from_rank0(
                f"finding step {step}", lambda: self.best_place(step) != self._home.folder(step)
            )
            return self._machine.folder(step) if is_near else self._home.folder(step)
        if near and wanted is not None and self._fetch(step, wanted):
            return self._machine.folder(step)
        if self._copier is not None:
            self._copier.require(step)
        with self._comm.agreed(f"looking for step {step} in the last place"):
            if self._comm.rank == 0:
                self._require_stored(step)
        return self._home.folder(step)

    def has_part(self, folder: Location) -> bool:
        """Whether a folder may hold a part of a checkpoint: what a load has asked for."""
        return self._has_parts and folder.parent != self._home.root

    def _fetch(self, step: int, wanted: Any) -> bool:
        """Whether all ranks can load a step from their disks; fetches what is missing. Collective.

        A file that is damaged on a disk is fetched again from another machine, and then from the
        last place.
        """
        stored = self._home.folder(step)

        def find() -> tuple[bytes | None, str | None]:
            if self._skipped[step] >= _TRIES_OF_DISKS or self._copier is None:
                return None, None
            if step in self._copier.pending:
                return self._copier.seal_of(step), None
            data = data_folder(stored)
            seal = read_seal(data) if is_committed(stored) else None
            return (None, None) if seal is None else (seal.to_json(), relative(data, stored))

        content, data = self._comm.from_rank0(f"reading the seal of step {step}", find)
        if content is None or self._disks is None:
            return False
        folder, *others = self._machine.paths(step)
        source = None if data is None else stored / data
        seal, wanted = Seal.from_json(content), as_state_dict(wanted, self._comm)
        # Behind the name of a file there may be which bytes of it.
        places = [f"{place}," for place in self._damage.pop(step, ())]
        damaged = {n for n in seal.files if any(p.startswith(f"{folder / n},") for p in places)}
        try:
            distrusted = damaged if self._skipped[step] > 1 else set()
            fetch_for_load(
                *(self._comm, self._disks, folder, seal, others, source),
                wanted,
                damaged=damaged,
                distrusted=distrusted,
            )
            record = self._comm.from_rank0(f"recording step {step}", self.near.record)
            with self._comm.agreed(f"recording step {step}"):
                if self._leads:
                    self.near.catch_up_with(record)
        except CheckpointingException as error:
            if isinstance(error, RankFailedError) and error.silent_ranks:
                raise
            if self._comm.rank == 0:
                logger.warning("step %d is not read from the disks: %s", step, error)
            return False
        return True

    def skip(self, step: int, error: CheckpointingException) -> None:
        """Note that a step could not be loaded, and which of its files on this disk are damaged."""
        if self.position == step:
            self.position = None
        self.damaged.add(step)
        self._skipped[step] += 1
        if self._disks is not None and isinstance(error, CorruptCheckpointError):
            leaders, rank = self._disks.leader_of_rank, self._comm.rank
            here = (f for f in error.findings if rank in {leaders[other] for other in f.ranks})
            self._damage[step] = [finding.path for finding in here if finding.path]

    def _require_stored(self, step: int) -> None:
        if not is_committed(self._home.folder(step)):
            finding = Finding(
                "it is neither in the last place nor whole on the disks",
                path=str(self._home.folder(step)),
                remedy="Load an older step, or start again with all disks that it was saved to.",
            )
            raise CheckpointNotFoundError(f"step {step} is not there", [finding])

    def tries(self) -> list[int]:
        """The steps of the history, newest first, as they may be loaded.

        One that machines have parts of comes again, to be read with a copy of what is damaged, and
        from the last place.
        """
        if not self._has_parts:
            return sorted((s for f in self._folders for s in f.history()), reverse=True)
        on_disks = [*self._whole_on_disks()] * _TRIES_OF_DISKS
        stored = self._home.history() * (_TRIES_OF_DISKS + 1)
        return sorted([*on_disks, *stored], reverse=True)

    def _whole_on_disks(self) -> set[int]:
        """The steps of the history that the disks alone hold together."""
        return {*self._pending} - self.near.record().abandoned

    def committed_steps(self) -> list[int]:
        """Every step that is in the root, or whole on the disks; oldest first."""
        folders = self._folders[-1:] if self._has_parts else self._folders
        pending = self._pending if self._has_parts else ()
        return sorted({*pending, *(s for folder in folders for s in folder.committed_steps())})

    def latest(self) -> int | None:
        """The newest one of the steps that the root and the disks say were committed last."""
        steps = {latest_step(folder.root) for folder in self._folders}
        if self._has_parts:
            steps = (steps | self._whole_on_disks()) & {*self.committed_steps()}
        return max((step for step in steps if step is not None), default=None)

    def best(self) -> int | None:
        """The committed step of the history with the best metric."""
        metrics = ChainMap(*(folder.record().metrics for folder in self._folders))
        steps = set(self.committed_steps()) - self.near.record().abandoned
        return next((s for s in self._retention.best_steps(metrics) if s in steps), None)

    def begin(
        self,
        step: int,
        metric: SupportsFloat | None,
        watch: Stopwatch,
        options: Mapping[str, Any],
        *,
        first: int = 0,
    ) -> tuple[SaveHooks, Path, dict[str, Any], int]:
        """Record that this manager will write the folder of a step, before it exists. Collective.

        Without ``overwrite`` the step must be above the one that the run has come to. It goes to
        the nearest place from ``first`` on that takes it.

        Returns:
            What the save calls, its folder, its options, and the next place. It overwrites a
            checkpoint that a manager of this run wrote and that is not in the history, or parts of
            a step that is nowhere whole. On a disk such a checkpoint is set aside instead. Where a
            place but the last one has no room for it, it raises NoRoomError before it writes.
        """
        what, overwrite = "beginning a save", bool(options.get("overwrite", False))
        valid = Outcome.of(what, partial(_require_step, step))
        place = self._place_of(step, valid, first)
        is_near = self._has_disks and place < len(self._places) - 1
        if self._copier is not None and (overwrite or place):
            self._copier.require(None)  # neither what is replaced nor another step comes there now
        target, disks = self._folders[place], None
        number, parent, is_ours, has_base, is_stored = self._comm.from_rank0(
            what, lambda: self._begin(target, step, metric, overwrite=overwrite), after=valid
        )
        folder = target.folder(step)
        if is_near and self._num_disks > 1:
            with self._comm.agreed("beginning a save on every disk"):
                if self._leads and self._comm.rank:
                    _, is_ours = target.begin(step, parent)
            on_part = partial(self._part_committed, target, step)
            disks = Disks(str(self._home.folder(step)), self._leads, on_part)
        at_end = partial(self._copier.copy, step if is_near else None) if self._copier else None
        is_whole = target.is_on_disk and not (is_near and self._has_parts)
        sets_aside = is_ours and is_whole and not overwrite
        chosen = {**options, "overwrite": overwrite or (is_ours and not is_whole)}
        if self._is_incremental:
            chosen.setdefault("base", target.folder(parent) if has_base else None)

        def check(index: Index) -> None:
            watch.num_bytes = index.num_bytes
            # How much a base leaves to write is known when its parts have been compared.
            has_base = chosen.get("base") is not None
            num_disks = self._num_disks if is_near else 1
            try:
                check_room(folder, 0 if has_base else watch.num_bytes // num_disks)
            except CheckpointingException as error:
                if is_near:
                    raise NoRoomError(error.message, error.findings) from error
                raise
            if sets_aside:
                target.set_aside(step)

        def claimed(attempt: str) -> None:
            target.claimed(step, number, parent, attempt)
            if is_stored and overwrite and not self._comm.rank:
                # Until it is copied, the disks have something newer.
                self._home.claimed(step, number, parent, attempt)

        def committed() -> None:
            saved = watch.saved(step, folder, number)
            self._committed(target, step)
            call_hooks(self._on_saved, saved)

        return SaveHooks(check, claimed, committed, disks, at_end), folder, chosen, place + 1

    def _place_of(self, step: int, valid: Outcome[None], first: int) -> int:
        """The number of the nearest place, from ``first`` on, that takes a step. Collective."""
        last = len(self._places) - 1
        if first == last or (first == 0 and self._places[0].every == 1):
            return first

        def is_due(number: int) -> bool:
            folder = self._folders[number]
            # Of two saves of a step on a machine, the nearer one is read.
            is_nearer = any(is_committed(f.folder(step)) for f in self._folders[:number])
            return not is_nearer and self._places[number].is_due(step, folder.newest())

        def choose() -> int:
            return next(filter(is_due, range(first, last)), last)

        return self._comm.from_rank0("choosing a place", choose, after=valid)

    def end_replacing(self) -> None:
        """Do what is left of a save that has set something aside, and has ended."""
        for folder in self._folders:
            folder.end_replacing()

    def _begin(
        self, target: RunFolder, step: int, metric: SupportsFloat | None, *, overwrite: bool
    ) -> tuple[float | None, int, bool, bool, bool]:
        """Begin a save on rank 0.

        Returns:
            Its metric, the step that it grows from, whether a manager of this run wrote what is
            there already, whether it can share files with the step that it grows from, and whether
            the last place has a save of this step.
        """
        number = math.nan if metric is None else float(metric)
        home, newest = self._home, self.position
        if newest is None:
            sound = (step for step in self.tries() if step not in self.damaged)
            newest = next(sound, None) if self.damaged else self.latest()
        if newest is not None and step <= newest and not overwrite:
            raise self._not_above(step, newest)
        is_stored = target is not home and is_committed(home.folder(step))
        if is_stored and not home.wrote(step, home.record()):
            finding = Finding("no manager of this root wrote it", path=str(home.folder(step)))
            raise CheckpointExistsError(f"step {step} is in the last place already", [finding])
        parent, is_ours = target.begin(step, newest)
        can_share = self._is_incremental and parent != NO_STEP
        has_base = can_share and is_committed(target.folder(parent))
        return None if math.isnan(number) else number, parent, is_ours, has_base, is_stored

    def _not_above(self, step: int, newest: int) -> CheckpointingException:
        """The error of a save that would go back in the history, or into that of another run."""
        known = "loaded or saved that step" if self.position is not None else "loaded nothing"
        finding = Finding(
            f"this manager has {known}",
            found=self.near.record().writer or None,
            path=str(self.best_place(newest)),
            remedy="To continue from an earlier step, load it first: manager.load(template, step). "
            "Save another run into another folder, or begin a new history in this one with "
            "CheckpointManager(root, fresh=True).",
        )
        is_there = is_committed(self.best_place(step))
        kind = CheckpointExistsError if is_there else CheckpointingException
        return kind(f"step {step} is not saved: the run is at step {newest} already", [finding])

    def _part_committed(self, target: RunFolder, step: int) -> None:
        """Note that rank 0 has committed what this disk holds a part of."""
        with tolerant(f"{target.folder(step)}: a commit is not recorded"):
            self._go_on_from(target, step)

    def _committed(self, target: RunFolder, step: int) -> None:
        """Move the pointer, and let the step be copied."""
        self.position = step
        if target is not self._home:
            with tolerant(f"{self.root} has steps that step {step} has not grown from"):
                self._home.go_back_with(target.record())
        self.damaged.discard(step)
        self._go_on_from(target, step)

    def _go_on_from(self, target: RunFolder, step: int) -> None:
        """Note the commit of what a folder holds of a step, in all folders of this machine."""
        machine = self._machine.folders
        if self._copier is not None and target in machine:
            self._copier.keep(step)
        target.committed(step)
        for folder in machine if target in machine else ():
            if folder is not target:
                note = folder.catch_up_with if folder is self.near else folder.go_back_with
                note(target.record())

    def loaded(self, step: int, *, is_newest: bool) -> None:
        """Note that the run goes on from a step.

        What is left on the disks is copied from now on, or from the next save if the run may
        have gone back, and may so abandon some of that.
        """
        self.position = step
        if self._copier is not None and is_newest:
            self._copier.copy()

    def verified(self, step: int) -> None:
        """Record that all of a step has been read back and compared, where it was read."""
        root = self.best_place(step).parent
        next(f for f in self._folders if f.root == root).note(step, verified=True)

    def delete(self, step: int) -> None:
        """Delete a step everywhere; see RunFolder. Collective."""
        if self.position == step:
            self.position = None
        if self._copier is not None:
            self._copier.require(None)
        with self._comm.agreed(f"deleting step {step}"):
            if self._comm.rank == 0:
                self._delete(step)
        if self._copier is not None:
            self._copier.forget({step})
            with self._comm.agreed(f"deleting step {step} on every disk"):
                for folder in self._machine.folders if self._leads and self._comm.rank else ():
                    if is_committed(folder.folder(step)):
                        folder.delete(step)

    def _delete(self, step: int) -> None:
        there = [self.near]
        if self._copier is not None:
            there = [folder for folder in self._folders if is_committed(folder.folder(step))]
            if not there and step not in self._pending:
                there = [self.near]  # which says that there is no such step
        for folder in there:
            folder.delete(step)

    def close(self) -> None:
        """Wait for the copies. Collective.

        Raises:
            CheckpointingException: if the newest checkpoint could not be copied.
        """
        if self._copier is not None:
            with self._comm.agreed("copying checkpoints to the last place"):
                self._copier.finish()

    def stop(self) -> None:
        """Let the thread that makes copies end."""
        if self._copier is not None:
            self._copier.stop()


def _require_step(step: object) -> None:
    if type(step) is not int or step < 0:
        finding = Finding("a step must be an int of at least 0", found=repr(step))
        raise CheckpointingException("cannot save this step", [finding])
