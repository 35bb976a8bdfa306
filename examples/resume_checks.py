"""What must hold between the run that saved and a run that resumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dist_checkpointing import Checkpoint
from training_runs import Run

FLOAT32_UNIT = 2.0**-23
"""The distance from 1 to the next float32: losses are compared in this unit, relatively."""

TOLERANCE_UNITS = 32
COMPARED_STEPS = 60
"""Another number of ranks sums the same products in another order.

The first losses then differ by 0 to 2 units. Each step builds on the one before, so even without a
checkpoint two such runs drift apart, tenfold in 50 steps and faster later: only the first steps can
tell a wrong state from rounding. Measured over 60 steps, several seeds and CPU instruction sets: at
most 8 units. (With the same number of ranks every step is compared, bit for bit.)
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    what: str
    holds: bool
    found: str


def check_resumed(saved: Run, resumed: Run) -> list[Check]:
    """Compare the restored tensors, then the losses of all steps after the save."""
    who = f"{saved.tensor_parallel} -> {resumed.tensor_parallel} ranks: "
    return [_check_restored(who, saved, resumed), _check_losses(who, saved, resumed)]


def check_fingerprints(saved: Path | str, again: Path, sizes: tuple[int, int]) -> Check:
    """Compare two checkpoints of so many ranks each as ``dckpt diff`` does: without their values.

    Only what keeps no fingerprints is read for them.
    """
    one, other = (Checkpoint.open(folder).fingerprints() for folder in (saved, again))
    wrong = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    found = f"{len(wrong)} differ: {', '.join(wrong[:3])}" if wrong else f"all {len(one)} equal"
    what = f"{sizes[0]} -> {sizes[1]} ranks: fingerprints of both checkpoints"
    return Check(what, bool(one) and not wrong, found)


def _check_restored(who: str, saved: Run, resumed: Run) -> Check:
    names = saved.digests.keys() | resumed.digests.keys()
    wrong = sorted(n for n in names if saved.digests.get(n) != resumed.digests.get(n))
    what = who + "restored global tensors, bit for bit"
    if resumed.iteration != saved.iteration:
        found = f"saved at step {saved.iteration}, resumed at {resumed.iteration}"
        return Check(what, holds=False, found=found)
    if wrong:
        found = f"{len(wrong)} of {len(names)} differ: {', '.join(wrong[:3])}"
        return Check(what, holds=False, found=found)
    return Check(what, bool(names), f"all {len(names)} SHA-256 equal")


def _check_losses(who: str, saved: Run, resumed: Run) -> Check:
    expected = {step: loss for step, loss in saved.losses.items() if step > saved.iteration}
    if not expected or expected.keys() != resumed.losses.keys():
        return Check(who + "losses", holds=False, found="not the same steps")
    units = [relative_units(resumed.losses[step], loss) for step, loss in expected.items()]
    if resumed.tensor_parallel == saved.tensor_parallel:
        same = resumed.losses == expected
        found = f"all {len(expected)} equal" if same else f"{max(units):.1f} units apart"
        return Check(who + "losses, bit for bit", same, found)
    units = units[:COMPARED_STEPS]
    what = f"{who}first {len(units)} losses, within {TOLERANCE_UNITS} float32 units"
    # One by one, so that a loss that is not a number fails.
    close = all(unit <= TOLERANCE_UNITS for unit in units)
    return Check(what, close, f"at most {max(units):.1f} units apart")


def relative_units(loss: float, expected: float) -> float:
    """Distance of two losses, relative to the expected one, in float32 units."""
    return abs(loss - expected) / expected / FLOAT32_UNIT
