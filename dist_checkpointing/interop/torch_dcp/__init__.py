"""torch DCP in both directions: our backends as DCP storages, DCP storages as our strategies."""
