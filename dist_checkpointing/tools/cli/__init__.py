"""``dckpt``: look into checkpoints, check, compare and convert them, without a cluster.

A command is a module: its options, and how its result is shown. What it finds out comes from the
library below, which imports torch only where values are needed.
"""
