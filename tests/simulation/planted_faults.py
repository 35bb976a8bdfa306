"""Faults planted in the library, and the first history of the simulated world that finds each.

Each is a small change of the source. ``python tests/simulation/planted_faults.py [NAME...]`` plays
histories from seed 0 up with a copy of the package that has the fault, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import dist_checkpointing

PACKAGE: Final = Path(dist_checkpointing.__file__).parent
HISTORIES: Final = 2000
_MOST_CHILDREN: Final = 2
_WIDTH: Final = 110


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A change of the library that breaks a promise.

    Attributes:
        name: What it is called.
        file: The module, below the package.
        before: Text that occurs once in it.
        after: What stands there instead.
        left_out: What the code does not do any more.
        place: The only kind of ``History.place`` that it can be met in; empty for any.
    """

    name: str
    file: str
    before: str
    after: str
    left_out: str
    place: str = ""

    def planted(self, source: str) -> str:
        """The module with the fault; ValueError if the text does not occur exactly once."""
        times = source.count(self.before)
        if times != 1:
            raise ValueError(f"{self.name}: the text occurs {times} times in {self.file}")
        return source.replace(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Found:
    """What came of playing histories with a fault.

    Attributes:
        fault: The fault.
        seed: Of the first history that fails; None if none does.
        played: How many were played until then.
        reason: What the world said of it; or why there is no answer.
    """

    fault: PlantedFault
    seed: int | None
    played: int
    reason: str


_COMMIT: Final = "format/commit.py"
_CLAIMS: Final = "filesystem/object_store_locks.py"
_FILES: Final = "filesystem/local_folder.py"
_LOCKS: Final = "filesystem/locks.py"
_RUN: Final = "manager/run_folder.py"
_SEAL: Final = "format/seal.py"
_STEPS: Final = "format/run_steps.py"
_REMOVAL: Final = "format/removal.py"

_DURABILITY: Final = (
    PlantedFault(
        "data files not synced",
        "filesystem/file_writer.py",
        "            if is_durable:\n                os.fsync(descriptor)\n",
        "            del is_durable\n",
        "the fsync of data files when they are complete",
        "folder",
    ),
    PlantedFault(
        "replaced files not synced",
        _FILES,
        "            if durability is Durability.FSYNC:\n                os.fsync(file.fileno())\n"
        "        os.replace(",
        "        os.replace(",
        "the fsync of metadata.json before it gets its name",
        "folder",
    ),
    PlantedFault(
        "name of the commit not synced",
        _FILES,
        "    if durability is Durability.FSYNC:\n        fsync_folder(path.parent)\n",
        "",
        "the fsync of the folder after metadata.json is in it",
        "folder",
    ),
    PlantedFault(
        "names not synced before the commit",
        _COMMIT,
        "            local_folder.fsync_folder(self.folder / DCKPT_FOLDER, self.folder)\n",
        "            pass\n",
        "the fsync of the folders that the last files are in",
        "folder",
    ),
    PlantedFault(
        "seal not synced",
        _SEAL,
        "    file_writer.put(folder, SEAL_NAME, content, durability)\n",
        "    file_writer.put(folder, SEAL_NAME, content)\n",
        "the fsync of the seal",
        "folder",
    ),
    PlantedFault(
        "tables of checksums not synced",
        "storage/driver.py",
        "            files.append(SealedFile.put(folder, name, data, durability))\n",
        "            files.append(SealedFile.put(folder, name, data, Durability.PAGE_CACHE))\n",
        "the fsync of the tables of checksums",
        "folder",
    ),
    PlantedFault(
        "names of tables not synced",
        "storage/driver.py",
        "        location.fsync_folder(folder / CHECKSUMS_NAME)\n",
        "        pass\n",
        "the fsync of the folder that the tables of checksums are in",
        "folder",
    ),
    PlantedFault(
        "common state not synced",
        "strategies/common.py",
        "SealedFile.put(root, COMMON_STATE_FNAME, data, self.durability)",
        "SealedFile.put(root, COMMON_STATE_FNAME, data, local_folder.Durability.PAGE_CACHE)",
        "the fsync of common.pt",
        "folder",
    ),
    PlantedFault(
        "parent folder not synced",
        _FILES,
        "        with suppress(PermissionError):\n            fsync_folder(folder.parent)\n",
        "",
        "the fsync of the folder that a new folder is in",
        "folder",
    ),
    PlantedFault(
        "names of chunk files not synced",
        "strategies/zarr/chunk_files.py",
        "            location.fsync_folders(made, root, to_root=self.rank > 0)\n",
        "",
        "the fsync of the folders of zarr arrays",
        "folder",
    ),
    PlantedFault(
        "names of the database not synced",
        "strategies/tensorstore/database.py",
        "        location.fsync_folders([name, *values.files], folder)\n",
        "        pass\n",
        "the fsync of the folders of the database",
        "folder",
    ),
    PlantedFault(
        "attempt not synced",
        _COMMIT,
        "            local_folder.fsync_folder(self.folder / ATTEMPT_NAME, dckpt, self.folder)\n",
        "            local_folder.fsync_folder(dckpt, self.folder)\n",
        "the fsync of attempt.json before the first file that it names",
        "folder",
    ),
    PlantedFault(
        "name of the attempt not synced",
        _COMMIT,
        "            local_folder.fsync_folder(self.folder / ATTEMPT_NAME, dckpt, self.folder)\n",
        "            local_folder.fsync_folder(self.folder / ATTEMPT_NAME)\n     "
        "       del dckpt\n",
        "the fsync of the folder that attempt.json is in",
        "folder",
    ),
    PlantedFault(
        "ended commit not synced",
        _COMMIT,
        "        (folder / name).unlink(missing_ok=True)\n    local_folder.fsync_folder(folder)\n",
        "        (folder / name).unlink(missing_ok=True)\n",
        "the fsync between taking metadata.json away and deleting the data",
        "folder",
    ),
    PlantedFault(
        "pointer not durable",
        _RUN,
        "            location.fsync_folder(self.root)\n            self.end_replacing()\n",
        "            self.end_replacing()\n",
        "the fsync of manager.json when it says what was committed",
        "folder",
    ),
    PlantedFault(
        "file written in its place",
        _FILES,
        '    temporary = f"{path}.{os.urandom(4).hex()}.tmp"\n    try:\n'
        '        with open(temporary, "xb", buffering=0) as file:\n            while rest:\n',
        "    temporary = path\n    try:\n"
        '        with open(temporary, "wb", buffering=0) as file:\n            while rest:\n',
        "the temporary name of metadata.json",
        "folder",
    ),
    PlantedFault(
        "failed sync ignored",
        "filesystem/file_writer.py",
        "            if is_durable:\n                os.fsync(descriptor)\n",
        "            if is_durable:\n                with suppress(OSError):\n"
        "                    os.fsync(descriptor)\n",
        "the error of an fsync, after which the data is lost",
        "folder",
    ),
)
"""What a power cut must not take."""

_FOLDERS: Final = (
    PlantedFault(
        "commit before the seal",
        "serialization/save_folder.py",
        "                noted = leftovers.attempt_json(attempt.id, attempt.creates)\n",
        "                noted = leftovers.attempt_json(attempt.id, attempt.creates)\n"
        "                attempt.commit(self.config)\n",
        "the order of seal and commit",
    ),
    PlantedFault(
        "commit before the data",
        "serialization/save_folder.py",
        "        if self._is_durable:\n            attempt.make_durable()\n      "
        "  return attempt\n",
        "        if self._is_durable:\n            attempt.make_durable()\n"
        "            attempt.commit(self.config)\n        return attempt\n",
        "the order of data and commit",
    ),
    PlantedFault(
        "leftovers not cleared",
        _COMMIT,
        "                clear(folder, left)\n",
        "",
        "the deletion of what a dead attempt has left",
        "folder",
    ),
    PlantedFault(
        "attempt not noted",
        _COMMIT,
        "            note_attempt(folder, attempt.id, names, noted)\n",
        "            note_attempt(folder, attempt.id, (), noted)\n",
        "the names of what the attempt is about to create",
        "folder",
    ),
    PlantedFault(
        "data removed before the commit",
        _REMOVAL,
        "        end_commit(folder)\n        clear(folder, names)\n",
        "        clear(folder, names)\n",
        "the end of the commit before its data is deleted",
        "folder",
    ),
    PlantedFault(
        "short write not completed",
        "filesystem/file_writer.py",
        "        if written < num_bytes:\n            "
        "_write_rest(self._descriptor, parts, written)\n",
        "        del written\n",
        "what a call of writev has left out",
        "folder",
    ),
    PlantedFault(
        "short chunk not completed",
        "strategies/data_files.py",
        "        while done < len(block):\n"
        "            done += os.pwrite(descriptor, block[done:], position + done)\n",
        "        del done\n",
        "what a call of pwrite has left out",
        "folder",
    ),
    PlantedFault(
        "claim not waited for",
        "serialization/save_folder.py",
        "if not location.is_seen(lambda: leftovers.is_in_attempt(self.data, claimed.attempt)):",
        "if not leftovers.is_in_attempt(self.data, claimed.attempt):",
        "the wait of other machines for attempt.json",
        "folder",
    ),
    PlantedFault(
        "late files not waited for",
        _SEAL,
        "    is_seen(are_seen)\n",
        "    are_seen()\n",
        "the wait of rank 0 for files of other machines",
        "folder",
    ),
    PlantedFault(
        "lock not taken",
        _LOCKS,
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        fcntl.flock(file, fcntl.LOCK_UN)\n",
        "the lock of the folder",
        "folder",
    ),
    PlantedFault(
        "lock not compared",
        _LOCKS,
        "    if not _is_at(file, at):\n",
        "    if False:\n",
        "the look whether the locked file still has its name",
        "folder",
    ),
    PlantedFault(
        "lock released too early",
        _COMMIT,
        "        except BaseException:\n            lock.release()\n            raise\n"
        "        return attempt\n\n    def make_durable",
        "        finally:\n            lock.release()\n        return attempt\n\n"
        "    def make_durable",
        "the lock while the save writes",
        "folder",
    ),
    PlantedFault(
        "lock of the living taken over",
        _LOCKS,
        "    if other is None or not other.is_gone:\n        raise _held(folder, "
        "other, name=name)\n",
        "    if other is None:\n        raise _held(folder, other, name=name)\n",
        "the look whether the holder of a lock file is gone",
        "folder",
    ),
    PlantedFault(
        "no second look under the lock",
        _COMMIT,
        "            there = refuse_committed(folder, overwrite=overwrite)\n            is_new",
        "            there = {*location.names_in(folder)}\n            is_new",
        "the look whether another save has committed before the lock was taken",
        "folder",
    ),
    PlantedFault(
        "replaced step not put back",
        _RUN,
        "                aside.rename(folder)\n",
        "                remove_checkpoint(aside)\n",
        "the return of a step whose replacement was cut off",
        "folder",
    ),
    PlantedFault(
        "base not compared",
        "strategies/incremental.py",
        "    is_same &= (digests.columns[rows] == base.digests[rows]).all(axis=1)\n",
        "",
        "the digests of what an incremental save shares",
        "folder",
    ),
)
"""The protocol of a local folder."""

_STORES: Final = (
    PlantedFault(
        "outcome not compared",
        _COMMIT,
        "        if claims.decide(root, self._claim.number, outcome) != outcome:\n"
        "            raise self._claim.lost()\n",
        "        claims.decide(root, self._claim.number, outcome)\n",
        "what commits/N.json says of this save",
        "store",
    ),
    PlantedFault(
        "commit put without a condition",
        _CLAIMS,
        "    return parsed_object(put_surely(path, json.dumps(outcome).encode()), path)\n",
        "    path.store.put(path.key, json.dumps(outcome).encode())\n    return outcome\n",
        "the condition of the put of commits/N.json",
        "store",
    ),
    PlantedFault(
        "metadata.json before the commit",
        _COMMIT,
        "        _put_config(self.folder, config)\n        if claims.decide(",
        "        _put_config(self.folder, config)\n        _put_config(root, config)\n"
        "        if claims.decide(",
        "the order of commits/N.json and metadata.json",
        "store",
    ),
    PlantedFault(
        "committed data cleared",
        _COMMIT,
        '            clear_saves(root, {*found} - {commit.attempt if commit else ""})\n',
        "            clear_saves(root, {*found})\n",
        "the exception of the committed save from what is cleared",
        "store",
    ),
    PlantedFault(
        "commit removed before metadata.json",
        _REMOVAL,
        "        store.delete([(root / CONFIG_FNAME).key])\n        for some in commits:\n"
        "            store.delete([(root / "
        'f"{claims.COMMITS}/{number}.json").key for number in some])\n',
        "        for some in commits:\n"
        "            store.delete([(root / "
        'f"{claims.COMMITS}/{number}.json").key for number in some])\n'
        "        store.delete([(root / CONFIG_FNAME).key])\n",
        "the order of a removal in a store",
        "store",
    ),
    PlantedFault(
        "data removed before its commit",
        _REMOVAL,
        "        store.delete([(root / CONFIG_FNAME).key])\n",
        "        claims.delete_below(root / DATA)\n        store.delete([(root / "
        "CONFIG_FNAME).key])\n",
        "the end of the commit before its data is deleted",
        "store",
    ),
    PlantedFault(
        "list ends after a page",
        "filesystem/object_store.py",
        "        while page := self.repeated(next_page):\n",
        "        for page in filter(None, [self.repeated(next_page)]):\n",
        "the second page of a list",
        "store",
    ),
    PlantedFault(
        "undecided claims not ended",
        _CLAIMS,
        '            decide(folder, earlier, {"ended_by": claim.attempt})\n',
        "            pass\n",
        "the end of the claim that a new one takes the place of",
        "store",
    ),
    PlantedFault(
        "living holder not waited for",
        _CLAIMS,
        "            _refuse_if_alive(folder, numbers[-1])\n",
        "            pass\n",
        "the wait for heartbeats of the holder of a claim",
        "store",
    ),
    PlantedFault(
        "claim not compared",
        _CLAIMS,
        "        if put_surely(claim.path, mine) != mine:\n"
        "            raise _in_use(Claim.read(folder, number) or claim)\n",
        "        put_surely(claim.path, mine)\n",
        "the look whose claim was put",
        "store",
    ),
    PlantedFault(
        "heartbeat never put",
        _CLAIMS,
        '                self._path.store.put(self._path.key, b"%d" % self.count)\n',
        "                pass\n",
        "the heartbeats of a save",
        "store",
    ),
    PlantedFault(
        "replaced data cleared before the commit",
        _COMMIT,
        "        # Readers go there from the commit on, where another checkpoint has been.\n",
        "        if self._replaces is not None:\n"
        "            clear_saves(root, {self._replaces.attempt})\n",
        "the order of a commit and the deletion of what it replaces",
        "store",
    ),
)
"""The protocol of an object store."""

_RUNS: Final = (
    PlantedFault(
        "retention deletes one too many",
        "manager/retention.py",
        "return {step for step in steps if step >= newest_first[count - 1]}",
        "return {step for step in steps if step > newest_first[count - 1]}",
        "the oldest step of those that are kept",
    ),
    PlantedFault(
        "retention before the commit",
        _RUN,
        "                known, begun=attempt, begun_metric=metric, begun_parent=parent\n"
        "            )\n",
        "                known, begun=attempt, begun_metric=metric, begun_parent=parent\n"
        "            )\n        last = self._retention.keep_last\n"
        "        for old in self.history()[last - 1 :] if last else ():\n"
        "            remove_checkpoint(self.folder(old))\n",
        "the commit between a save and what retention deletes for it",
    ),
    PlantedFault(
        "last verified step not protected",
        _RUN,
        "        named = (latest, record.last_verified, *self._also_kept())\n",
        "        named = (latest, *self._also_kept())\n",
        "the protection of the last verified step from retention",
    ),
    PlantedFault(
        "pointer not brought up to date",
        _STEPS,
        "    record = up_to_date(root, read_record(root))\n    pointer = record.latest\n",
        "    record = read_record(root)\n    pointer = record.latest\n",
        "the look for a commit that the pointer does not know",
    ),
    PlantedFault(
        "version of the record in a store not compared",
        _STEPS,
        "            return put_surely(path, data, version) == data\n",
        "            raise UnsupportedFormatError('')\n",
        "the condition of the request that writes the record of the run",
        "store",
    ),
    PlantedFault(
        "version of the record on a disk not compared",
        _STEPS,
        "        if read_record(root).version == version:\n            try:\n",
        "        if True:\n            try:\n",
        "the look whether a record is still the one that was changed",
        "folder",
    ),
    PlantedFault(
        "steps of all branches in the history",
        _STEPS,
        "        if newest is None:\n            return sorted(steps, reverse=True)\n",
        "        if True:\n            return sorted(steps, reverse=True)\n",
        "what a run has gone back from",
    ),
    PlantedFault(
        "parent of a step not recorded",
        _RUN,
        "        self._begun = StepRecord(attempt, metric=metric, parent=parent)\n",
        "        self._begun = StepRecord(attempt, metric=metric)\n",
        "the step that a save has grown from",
    ),
    PlantedFault(
        "parent of a begun step not recorded",
        _RUN,
        "                known, begun=attempt, begun_metric=metric, begun_parent=parent\n",
        "                known, begun=attempt, begun_metric=metric, begun_parent=NO_STEP\n",
        "the step that a save has grown from, if it was killed after its commit",
    ),
    PlantedFault(
        "position not moved by a load",
        "manager/run.py",
        "        self.position = step\n        if self._copier is not None and is_newest",
        "        if self._copier is not None and is_newest",
        "the step that a run goes on from after a load",
    ),
    PlantedFault(
        "position not moved by a save",
        "manager/run.py",
        "        self.position = step\n        if target is not self._home",
        "        if target is not self._home",
        "the step that a run has come to after a save",
    ),
    PlantedFault(
        "old step number allowed",
        "manager/run.py",
        "        if newest is not None and step <= newest and not overwrite:\n",
        "        if False:\n",
        "the refusal of a step that is not above the one that the run has come to",
    ),
    PlantedFault(
        "retention counts all branches",
        "manager/retention.py",
        "sorted(steps if history is None else history, reverse=True)",
        "sorted(steps, reverse=True)",
        "the history, of which alone retention counts the steps",
    ),
    PlantedFault(
        "replaced step ended before the commit",
        "manager/run.py",
        "        sets_aside = is_ours and is_whole and not overwrite\n"
        '        chosen = {**options, "overwrite": overwrite or (is_ours and not is_whole)}\n',
        "        sets_aside = False\n"
        '        chosen = {**options, "overwrite": overwrite or is_ours}\n',
        "the old step of a number until a new one has committed",
        "folder",
    ),
)
"""What a manager knows of a run."""

_RANKS: Final = (
    PlantedFault(
        "error of a rank not raised",
        "serialization/save_steps.py",
        "            written = driver.write_plan("
        "self._local_plan, self.planner, self.writer, self.rank)\n",
        "            try:\n                written = driver.write_plan("
        "self._local_plan, self.planner, self.writer, self.rank)\n"
        "            except OSError:\n                written = driver.Written()\n",
        "the errors that ranks meet as they write",
    ),
    PlantedFault(
        "error of an async save swallowed",
        "serialization/async_save.py",
        "            if error is not None and not self._is_seen:\n                raise error\n",
        "            del error\n",
        "the error of a save in the background",
    ),
    PlantedFault(
        "tensors not copied",
        "serialization/save_steps.py",
        "            self.planner = self.strategy.stage(self._local_plan, "
        "self.planner, self._buffers)\n",
        "",
        "the copies of the tensors of an async save",
    ),
    PlantedFault(
        "objects not copied",
        "serialization/save_steps.py",
        "self._parts.nested(staging.copied_objects(self.objects))",
        "self._parts.nested(self.objects)",
        "the copies of the objects of an async save",
    ),
    PlantedFault(
        "checksums of tensors not compared",
        "strategies/verification.py",
        "            is_other = found != self.table.digests[block]\n",
        "            is_other = np.zeros(len(found), dtype=np.bool_)\n",
        "the comparison of what was loaded with the checksums of the save",
    ),
    PlantedFault(
        "digests of the seal not compared",
        _SEAL,
        "        if digest != sealed.digest:\n",
        "        if False:\n",
        "the comparison of small files with the seal",
    ),
    PlantedFault(
        "change under a load not seen",
        "strategies/selection.py",
        "        return is_there and number_of_save(self.folder) == self.save_number\n",
        "        return is_there or True\n",
        "the second look at the checkpoint after a load",
    ),
    PlantedFault(
        "late commit not waited for",
        "strategies/selection.py",
        "if comm.rank and not is_seen(lambda: commit.is_committed(root) or is_database(root)):",
        "if comm.rank and not (commit.is_committed(root) or is_database(root)):",
        "the wait of other machines for metadata.json",
        "folder",
    ),
    PlantedFault(
        "latest_valid looks at nothing",
        "manager/checkpoint_manager.py",
        "                self.verify(step)\n            except CheckpointingException as error:\n",
        "                pass\n            except CheckpointingException as error:\n",
        "the verification of the step that latest_valid returns",
    ),
    PlantedFault(
        "newest step not verified",
        "manager/checkpoint_manager.py",
        'chosen = {"trusted": self._trusted, "verify": verify, **options}',
        'chosen = {"trusted": self._trusted, "verify": False, **options}',
        "the checksums of the step that a training goes on from",
    ),
    PlantedFault(
        "silent rank not waited for",
        "serialization/save_folder.py",
        "        if isinstance(error, CheckpointingException) and not is_silent:\n",
        "        if isinstance(error, CheckpointingException):\n",
        "the names of what a rank that does not answer may still write",
        "folder",
    ),
)
"""What ranks agree about, and what a load compares."""

PLANTED_FAULTS: Final = (*_DURABILITY, *_FOLDERS, *_STORES, *_RUNS, *_RANKS)

_PROGRAM: Final = """
import itertools, json, logging, sys
logging.disable(logging.CRITICAL)
from histories import History
from history_player import Failure, play
place, count = sys.argv[1], int(sys.argv[2])
histories = ((seed, History.of(seed)) for seed in itertools.count())
of_place = ((seed, one) for seed, one in histories if place in ("", one.place))
for played, (seed, history) in enumerate(itertools.islice(of_place, count), 1):
    result = play(history)
    if isinstance(result, Failure):
        reason = f"{type(result.error).__name__}: {result.error}"
        print(json.dumps({"seed": seed, "played": played, "reason": reason}))
        break
else:
    print(json.dumps({"seed": None, "played": played, "reason": "not found"}))
"""


@contextmanager
def planted(fault: PlantedFault) -> Iterator[dict[str, str]]:
    """The environment of processes that import a copy of the package with a fault."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        package = Path(folder) / PACKAGE.name
        shutil.copytree(PACKAGE, package)
        module = package / fault.file
        module.write_text(fault.planted(module.read_text()))
        paths = os.pathsep.join([folder, str(Path(__file__).parent)])
        yield {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}


def find(fault: PlantedFault, histories: int = HISTORIES, seconds: float = 3600.0) -> Found:
    """Play histories with a fault until one fails, in a process of its own."""
    # Without -P, a package in the working folder would be imported in its place.
    given = [sys.executable, "-P", "-c", _PROGRAM, fault.place, str(histories)]
    with planted(fault) as environment:
        try:
            done = subprocess.run(
                given,
                capture_output=True,
                text=True,
                env=environment,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Found(fault, None, 0, f"not found within {seconds:.0f} s")
    if done.returncode:
        return Found(fault, None, 0, f"the process ended: {done.stderr.strip()[-500:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return Found(fault, said["seed"], said["played"], said["reason"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults; by default all")
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most, for each fault")
    options = parser.parse_args(arguments)
    known = {fault.name: fault for fault in PLANTED_FAULTS}
    chosen = [known[name] for name in options.names] or [*PLANTED_FAULTS]
    missed = 0
    print("| fault | left out | seed | histories | what was said |\n|---|---|---|---|---|")
    with ThreadPoolExecutor(_MOST_CHILDREN) as pool:
        for found in pool.map(lambda f: find(f, options.histories, options.seconds), chosen):
            missed += found.seed is None
            reason = found.reason.replace("\n", " ").replace("|", "/")[:_WIDTH]
            fault = found.fault
            row = (fault.name, fault.left_out, found.seed, found.played, reason)
            print("|", " | ".join(map(str, row)), "|", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
