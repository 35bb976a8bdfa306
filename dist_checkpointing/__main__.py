"""``python -m dist_checkpointing`` is ``dckpt``."""

from dist_checkpointing.tools.cli.app import main

main()
