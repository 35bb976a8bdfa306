"""The suite that every backend passes: subclass it, name the backend, run pytest."""

from dist_checkpointing.testing.conformance.calls_and_failures import Failures, StorageProtocol
from dist_checkpointing.testing.conformance.contents import Contents, RoundTrips


class StrategyConformance(RoundTrips, Contents, StorageProtocol, Failures):
    """Tests of all that ``save`` and ``load`` promise, with one backend on 1, 2 and 4 ranks.

    A subclass sets ``backend``, which is found through its entry points. To test a strategy that is
    not registered, or one with options, it overrides ``save_strategy`` and ``load_strategy``. It
    may also override ``dtypes``, ``refused_keys``, ``damage`` and ``shorten``; see BackendHooks.
    The tests are methods of the four bases, each of which can be used alone.

    Example:
        >>> class TestZarr(StrategyConformance):
        ...     backend = ("zarr", 2)
    """
