"""How ``load`` treats keys that only the template or only the checkpoint has."""

from __future__ import annotations

from enum import Enum


class StrictHandling(Enum):
    """How ``load`` treats keys that only the template or only the checkpoint has.

    An "unexpected" key is in the template of this rank and not in the checkpoint. A "missing" key
    is in the checkpoint and in the template of no rank.

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
        """Whether ``load`` also returns the sets of missing and unexpected keys."""
        return value in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: StrictHandling | str) -> StrictHandling:
    """The flag, given as such or by its name in lower case.

    Raises:
        ValueError: for any other value.

    Example:
        >>> parse_strict_flag("raise_all")
        <StrictHandling.RAISE_ALL: 'raise_all'>
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        names = ", ".join(member.value for member in StrictHandling)
        given: object = strict  # whatever it is
        near = "; 'raise_all' is the strictest" if given is True else ""
        near = "; 'ignore_all' is the mildest" if given is False else near
        raise ValueError(
            f"Invalid strict flag: strict={strict!r}; expected one of {names}{near}"
        ) from None
