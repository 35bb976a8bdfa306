"""``python -m dist_checkpointing`` is ``dckpt``."""

from dist_checkpointing.cli.app import main

main()
