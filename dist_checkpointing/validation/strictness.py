"""What to do about keys that only a template or only a checkpoint has."""

from __future__ import annotations

from enum import Enum


class StrictHandling(Enum):
    """What ``load`` does about keys that only the template or only the checkpoint has.

    "Unexpected" keys are asked for by this rank and not in the checkpoint; "missing" keys are in
    the checkpoint and asked for by no rank.

    Example:
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, "ckpt/7")
        >>> template = {"v": ShardedTensor.from_rank_offsets("v", torch.empty(2))}
        >>> state, missing, unexpected = load(template, "ckpt/7", strict=StrictHandling.RETURN_ALL)
        >>> missing, unexpected
        ({'w'}, {'v'})
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(value: StrictHandling) -> bool:
        """Whether unexpected keys are handled before the backend sees them."""
        return value != StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(value: StrictHandling) -> bool:
        """Whether the keys of all ranks are needed."""
        return value in (
            StrictHandling.IGNORE_ALL,
            StrictHandling.RAISE_ALL,
            StrictHandling.RETURN_ALL,
            StrictHandling.LOG_ALL,
        )

    @staticmethod
    def requires_returning_mismatch_keys(value: StrictHandling) -> bool:
        """Whether ``load`` returns the two sets beside the state dict."""
        return value in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: StrictHandling | str) -> StrictHandling:
    """The flag, given itself or its lower-case name.

    Raises:
        ValueError: for anything else.

    Example:
        >>> parse_strict_flag("raise_all")
        <StrictHandling.RAISE_ALL: 'raise_all'>
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        names = ", ".join(member.value for member in StrictHandling)
        raise ValueError(f"Invalid strict flag: {strict!r}; expected one of {names}") from None
