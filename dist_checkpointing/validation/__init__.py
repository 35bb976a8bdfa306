"""Whether ranks agree, and whether a template fits a checkpoint."""

from dist_checkpointing.validation.load_errors import (
    StrictHandling as StrictHandling,
    parse_strict_flag as parse_strict_flag,
)
