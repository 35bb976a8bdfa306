"""Backends: each reads and writes one format, and is found through the registry by name."""

if __name__ != "dist_checkpointing.strategies":
    # The link at the top level of the repository is for browsing; through it every class here
    # would exist twice, and isinstance would fail in ways that nobody understands.
    raise ImportError(
        f"import dist_checkpointing.strategies, not {__name__!r}: the top-level 'strategies' is "
        "only a link to that folder"
    )
