"""``python -m dist_checkpointing`` is ``dckpt``."""

from dist_checkpointing.tools.app import main

main()
