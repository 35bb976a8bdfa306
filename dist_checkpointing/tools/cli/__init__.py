"""``dckpt``: look into checkpoints, check, compare and convert them, without a cluster.

Each command is a module with its options and its output. The modules below find the results, and
import torch only where they need values.
"""
