"""Whether what was written has the fingerprints that the source keeps."""

from __future__ import annotations

from collections.abc import Mapping

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import data_folder
from dist_checkpointing.format.index import read_index
from dist_checkpointing.storage.fingerprints import fingerprints_by_reading
from dist_checkpointing.tools.convert.plan import ConversionPlan
from dist_checkpointing.tools.convert.sources import CheckpointSource, Source


def prove_checkpoint(
    plan: ConversionPlan, source: Source, folder: Location, most_bytes: int
) -> int:
    """Compare a checkpoint that was written; see ``prove``.

    The fingerprints are those that were taken of the values on their way into it. A format that
    does not keep any is read again.
    """
    index = read_index(data_folder(folder))
    if index is not None and index.fingerprints:
        return _compare(_expected(plan, source), index.fingerprints)
    return prove(plan, source, CheckpointSource(folder), most_bytes)


def prove(plan: ConversionPlan, source: Source, written: Source, most_bytes: int) -> int:
    """Compare the fingerprints of the source with those of what was written, which is read.

    Args:
        plan: what was converted.
        source: what it was converted from.
        written: what it was converted into. Closed when this returns.
        most_bytes: memory for values.

    Returns:
        Number of tensors that were compared: those that keep their dtype, if the source keeps
        fingerprints of them.

    Raises:
        CorruptCheckpointError: if any has another fingerprint.
    """
    expected = _expected(plan, source)
    try:
        found = fingerprints_by_reading(
            written.index, expected, written.read, most_bytes=most_bytes
        )
    finally:
        written.close()
    return _compare(expected, found)


def _expected(plan: ConversionPlan, source: Source) -> dict[str, str]:
    kept = source.index.fingerprints
    return {
        tensor.key: kept[tensor.source.key]
        for tensor in plan.tensors
        if tensor.dtype == tensor.source.dtype and tensor.source.key in kept
    }


def _compare(expected: Mapping[str, str], found: Mapping[str, str]) -> int:
    findings = [
        Finding("was not converted bit by bit", key, expected=own, found=found.get(key))
        for key, own in expected.items()
        if found.get(key) != own
    ]
    if findings:
        message = "what was written has other fingerprints than the source"
        raise CorruptCheckpointError(message, findings)
    return len(expected)
