"""Who may write below a prefix of an object store, decided by put-if-absent alone.

``.dckpt/claims/<n>.json`` is the nth claim. ``.dckpt/commits/<n>.json`` says what became of it: its
holder has committed, or another process has ended it. Either is put once and stays as long as the
checkpoint. ``.dckpt/beats/<attempt>`` is put again and again while the holder is alive, first when
the claim is a period old. No clocks are compared: a process that was stopped for an hour finds its
claim ended, and damages nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import queue
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Final

from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.location import read_regular
from dist_checkpointing.filesystem.locks import Holder, Kind
from dist_checkpointing.filesystem.object_store import (
    ObjectInfo,
    ObjectPath,
    ObjectStore,
    StoreUnavailableError,
)

logger: logging.Logger = logging.getLogger(__name__)
CLAIMS: Final = ".dckpt/claims"
COMMITS: Final = ".dckpt/commits"
BEATS: Final = ".dckpt/beats"
THREAD: Final = "dckpt-heartbeats"
"""Name of the thread that puts them."""
PERIOD: Final = 20.0
"""Seconds from one heartbeat to the next."""
_MAX_PERIOD: Final = 3600.0
_given_up: Final[set[str]] = set()
"""Attempts of this process that go on no more, although it lives on."""
_SILENT_PERIODS: Final = 3
_LOOKS_PER_PERIOD: Final = 4
_BRIEF_SECONDS: Final = 5.0
_PRUNED_EVERY: Final = 8
_KEPT: Final = 3
"""So many decided claims stay when the others are deleted."""
_MAX_BYTES, _MAX_PUT_BYTES = 1 << 20, 1 << 26
_probed: Final[set[ObjectStore]] = set()
"""Buckets that refuse a second put-if-absent of a name."""


def put_surely(path: ObjectPath, data: bytes, mode: Any = "create") -> bytes:
    """Put an object by a mode of ``ObjectStore.put``; the content of the one that is there then.

    An answer that is lost, or says that the server failed, leaves open whether the object was put:
    it is read then, so ``data`` must be no other caller's. CheckpointingException if the store does
    not answer, PermissionError if access is denied.
    """

    def put() -> bytes:
        try:
            path.store.put(path.key, data, mode=mode)
        except PermissionError:
            raise
        except OSError as error:
            with suppress(OSError):  # the first error says more
                stored = read_regular(brief(path), _MAX_PUT_BYTES)
                is_refused = mode == "create" or isinstance(error, FileExistsError)
                if stored == data or (is_refused and stored is not None):
                    return stored
            if isinstance(error, FileExistsError):  # of S3: another put was under way
                raise StoreUnavailableError(error.errno, error.strerror, str(path)) from error
            raise
        return data

    try:
        return path.store.repeated(put)
    except PermissionError:
        raise
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            raise _without_conditions(path.store, str(error.strerror)) from error
        finding = Finding(f"the last answer was: {error.strerror}", path=str(path))
        message = "an object cannot be put into the store"
        raise CheckpointingException(message, [finding]) from error


def _without_conditions(store: ObjectStore, problem: str) -> UnsupportedFormatError:
    finding = Finding(
        problem,
        expected="status 412 to If-None-Match: *",
        path=store.url,
        remedy="Save to S3, GCS, Azure, Ceph or another store with conditional puts: in this one, "
        "two saves could mix into one checkpoint.",
    )
    return UnsupportedFormatError("the store has no conditional puts", [finding])


def brief(place: ObjectPath, seconds: float = _BRIEF_SECONDS) -> ObjectPath:
    """The same place, for what can be left out: no request there takes long."""
    options = place.store.options
    seconds = min(seconds, options.retry_timeout)
    options = replace(options, retry_timeout=seconds, timeout=min(seconds, options.timeout))
    return replace(place, store=replace(place.store, options=options))


def numbers_in(
    folder: ObjectPath, found: Iterable[ObjectInfo] | None = None
) -> tuple[list[int], list[int]]:
    """The numbers of the claims of a checkpoint, and of those that are decided; ascending.

    ``found`` are objects of it that have been listed already.
    """
    numbers: dict[str, list[int]] = {CLAIMS: [], COMMITS: []}
    for info in (folder / ".dckpt").objects() if found is None else found:
        kind, _, name = info.key.removeprefix(folder.prefix).rpartition("/")
        number = name.removesuffix(".json")
        if kind in numbers and number.isdecimal():
            numbers[kind].append(int(number))
    return sorted(numbers[CLAIMS]), sorted(numbers[COMMITS])


def delete_below(folder: ObjectPath) -> None:
    folder.store.delete([info.key for info in folder.objects()])


def decide(folder: ObjectPath, number: int, outcome: dict[str, Any]) -> dict[str, Any]:
    """Say what becomes of a claim, unless that was said before; what is true then.

    CorruptCheckpointError if what was said before cannot be read.
    """
    path = folder / f"{COMMITS}/{number}.json"
    return parsed_object(put_surely(path, json.dumps(outcome).encode()), path)


def read_outcome(folder: ObjectPath, number: int) -> dict[str, Any]:
    """What became of a claim, see ``decide``; empty if it is undecided."""
    path = folder / f"{COMMITS}/{number}.json"
    data = read_regular(path, _MAX_BYTES)
    return {} if data is None else parsed_object(data, path)


def parsed_object(data: bytes, path: ObjectPath) -> dict[str, Any]:
    with local_folder.parsing("an object of the commit protocol cannot be read", path):
        return dict(local_folder.parse_json(data))


@dataclass(eq=False)
class Claim:
    """The content of ``.dckpt/claims/<n>.json`` below a folder; later claims have higher numbers.

    ``period`` is the seconds from one heartbeat of the holder to the next.
    """

    folder: ObjectPath
    number: int
    holder: Holder
    period: float

    @property
    def attempt(self) -> str:
        return self.holder.token

    @property
    def path(self) -> ObjectPath:
        return self.folder / f"{CLAIMS}/{self.number}.json"

    @property
    def beats(self) -> ObjectPath:
        return self.folder / f"{BEATS}/{self.attempt}"

    def to_json(self) -> bytes:
        return json.dumps({"period": self.period, "holder": self.holder._asdict()}).encode()

    @classmethod
    def read(cls, folder: ObjectPath, number: int) -> Claim | None:
        """A claim; None if it was removed. CorruptCheckpointError if what is there is no claim."""
        path = folder / f"{CLAIMS}/{number}.json"
        data = read_regular(path, _MAX_BYTES)
        if data is None:
            return None
        remedy = "Delete everything below this prefix, or save to another one."
        with local_folder.parsing("a claim cannot be read", path, remedy=remedy):
            content = local_folder.parse_json(data)
            holder = Holder.parsed(json.dumps(content["holder"]).encode())
            period = float(content["period"])
            if holder is None or not 0 < period <= _MAX_PERIOD:
                raise ValueError("no holder, or no possible period")
            return Claim(folder, number, holder, period)


class HeldClaim(Claim):
    """A claim of this process, and the heartbeats that tell others that it is alive.

    When it was made, the objects in ``.dckpt`` were the ``found`` ones; ``numbers`` were those of
    all claims, and ``decided`` of those that are.
    """

    found: list[ObjectInfo]
    numbers: list[int]
    decided: list[int]

    def __init__(self, claim: Claim) -> None:
        super().__init__(claim.folder, claim.number, claim.holder, claim.period)
        # The thread does not keep this object: a save that is forgotten must not look alive.
        self._thread = Heartbeats(self.beats, self.period, THREAD)
        self._stop = weakref.finalize(self, self._thread.stop)

    @classmethod
    def acquire(
        cls,
        folder: ObjectPath,
        period: float = PERIOD,
        known: tuple[list[int], list[int]] | None = None,
    ) -> HeldClaim:
        """Claim a folder. No earlier claim can commit any more after that.

        If the last claim is undecided, this waits until its holder is known to be alive or dead.
        CheckpointExistsError if another process has the claim, and is alive; UnsupportedFormatError
        if the store replaces the first one, which is put twice. ``known`` is what ``numbers_in``
        has just found.
        """
        numbers, decided = numbers_in(folder) if known is None else known
        undecided = sorted({*numbers} - {*decided})
        if undecided and undecided[-1] == numbers[-1]:
            # Those below it were decided before it was made.
            _refuse_if_alive(folder, numbers[-1])
        number = max([0, *numbers, *decided]) + 1
        claim = Claim(folder, number, Holder.current(Kind.FILE), period)
        for earlier in undecided:
            decide(folder, earlier, {"ended_by": claim.attempt})
        mine = claim.to_json()
        if put_surely(claim.path, mine) != mine:
            raise _in_use(Claim.read(folder, number) or claim)
        if folder.store not in _probed and put_surely(claim.path, mine + b"\n") != mine:
            with suppress(OSError):
                brief(claim.path).store.delete([claim.path.key])
            problem = "a second conditional put of one name was not refused"
            raise _without_conditions(folder.store, problem)
        _probed.add(folder.store)
        held = cls(claim)
        # A removal between the list and the put may have made the numbers begin again.
        held.found = [*(folder / ".dckpt").objects()]
        held.numbers, held.decided = numbers_in(folder, held.found)
        if number in held.decided:
            held.stop()
            raise held.lost()
        below = [n for n in held.numbers if n < number and n not in held.decided]
        if below:
            held.end()
            raise _in_use(Claim.read(folder, below[-1]) or claim)
        return held

    @property
    def is_held(self) -> bool:
        """Whether this process still says that it is alive."""
        return self._stop.alive

    def stop(self) -> None:
        """Say no more that this process is alive. What becomes of the claim stays open."""
        _given_up.add(self.attempt)
        self._stop()

    def require_held(self) -> None:
        """CheckpointExistsError if another process has ended the claim, or removed all."""
        self.require_there()
        if read_outcome(self.folder, self.number):
            raise self.lost()

    def require_there(self) -> None:
        """CheckpointExistsError if the claim was removed; it may have been ended."""
        stored = read_regular(self.path, _MAX_BYTES)
        if stored is None:
            raise self.lost("is not there any more: it was removed with all else")
        if stored != self.to_json():
            raise self.lost()

    def lost(self, how: str = "") -> CheckpointExistsError:
        """The error of a process whose claim another one has ended."""
        ended = f"was ended: no heartbeat was seen for {_SILENT_PERIODS * self.period:.0f} s"
        finding = Finding(
            f"claim {self.number} {how or ended}",
            path=str(self.folder),
            remedy="Look at what holds here now. Nothing of it was touched.",
        )
        message = f"another process has taken over {self.folder}"
        return CheckpointExistsError(message, [finding])

    def prune(self, kept: int | None) -> None:
        """Delete the oldest claims, and what became of them, but for ``kept`` and fences."""
        if self.number % _PRUNED_EVERY == 0:
            outcomes = {number: read_outcome(self.folder, number) for number in self.decided}
            fences = fence_numbers(self.folder, self.numbers, outcomes)
            old = {*self.decided[:-_KEPT]} - {kept} - fences
            # In this order: what a crash leaves is a claim that the next save ends.
            for kind in (COMMITS, CLAIMS):
                keys = [(self.folder / f"{kind}/{number}.json").key for number in sorted(old)]
                self.folder.store.delete(keys)

    def end(self) -> dict[str, Any]:
        """Give the claim up unless it is decided; what has become of it."""
        try:
            outcome = decide(brief(self.folder), self.number, {"ended_by": self.attempt})
        except BaseException:
            self.stop()  # the next save finds it dead
            raise
        self.forget()
        return outcome

    def forget(self) -> None:
        """Stop the heartbeats, and delete their object: what becomes of the claim is decided."""
        self.stop()
        _given_up.discard(self.attempt)  # it is decided
        self._thread.join(self.period)  # it may be about to put one more
        if self._thread.count:
            brief(self.folder).store.delete([self.beats.key])


def fence_numbers(
    folder: ObjectPath, numbers: Iterable[int], outcomes: Mapping[int, Mapping[str, Any]]
) -> set[int]:
    """Numbers that must stay decided when all else is removed, or they would be given again.

    These are claims that another process has ended, whose holder may yet wake up. ``numbers`` are
    those of all claims, and ``outcomes`` what became of each that is decided.
    """
    ended = {
        number: outcome["ended_by"] for number, outcome in outcomes.items() if "ended_by" in outcome
    }
    # Those of an earlier removal, and no late commit of a save whose claim was pruned.
    fences = ended.keys() - {*numbers}
    for number, by in ended.items():
        claim = None if number in fences else Claim.read(folder, number)
        if claim is not None and by != claim.attempt and not claim.holder.is_gone:
            fences.add(number)
    return fences


def _refuse_if_alive(folder: ObjectPath, number: int) -> None:
    """Wait until it is known that the holder of a claim is dead, or that the claim was decided.

    CheckpointExistsError if it is alive. Looks are counted, not seconds: this process may be
    stopped itself while it watches.
    """
    claim = Claim.read(folder, number)
    if claim is None or claim.holder.is_gone or claim.attempt in _given_up:
        return
    logger.info("%s may be in use: watching process %s", folder, claim.holder.pid)
    beats = claim.beats
    first = beats.store.head(beats.key)
    for _ in range(_SILENT_PERIODS * _LOOKS_PER_PERIOD):
        time.sleep(claim.period / _LOOKS_PER_PERIOD)
        if read_outcome(folder, number):
            return
        if beats.store.head(beats.key) != first:
            raise _in_use(claim)


def last_known_holder(folder: ObjectPath) -> Holder | None:
    """Who claims a folder and seems to be alive, by the clocks of the store and of this machine.

    For people only. It takes nothing, and does not wait. See ``Claim.read`` for its errors.
    """
    numbers, decided = numbers_in(folder)
    claim = Claim.read(folder, numbers[-1]) if numbers else None
    if claim is None or claim.holder.is_gone:
        return None
    last = folder.store.head(claim.beats.key)  # it goes when all is done
    if last is None and numbers[-1] not in decided:
        last = folder.store.head(claim.path.key)
    is_silent = last is None or time.time() - last.modified > _SILENT_PERIODS * claim.period
    return None if is_silent else claim.holder


class Heartbeats(Thread):
    """Puts an object after each ``period`` of seconds: others see that this process is alive.

    ``count`` is how often it has been put.
    """

    def __init__(self, path: ObjectPath, period: float, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._path, self._period = brief(path, max(period, _BRIEF_SECONDS)), period
        # The collector may stop this while the thread itself holds the lock of an Event.
        self._stops: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.count: int = 0
        self.start()

    def stop(self) -> None:
        self._stops.put(None)

    def run(self) -> None:
        while True:
            with suppress(queue.Empty):
                self._stops.get(timeout=self._period)
                return
            self.count += 1
            try:
                # Another content each time: the ETag of S3 is a digest of it.
                self._path.store.put(self._path.key, b"%d" % self.count)
            except OSError as error:
                logger.warning("%s: no heartbeat (%s)", self._path, error.strerror)


def _in_use(claim: Claim) -> CheckpointExistsError:
    finding = Finding(
        f"process {claim.holder.pid} on {claim.holder.host} writes here",
        path=str(claim.folder),
        remedy="Wait for it to end.",
    )
    return CheckpointExistsError(f"{claim.folder} is in use", [finding])
