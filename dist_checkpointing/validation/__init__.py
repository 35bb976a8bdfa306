"""Whether ranks agree, and whether a template fits a checkpoint."""

from dist_checkpointing.validation.load_errors import StrictHandling, parse_strict_flag

__all__ = ["StrictHandling", "parse_strict_flag"]
