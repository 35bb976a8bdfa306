"""Megatron's own code on this library: its package of checkpoints resolves to ours.

Call ``install()`` before anything imports ``megatron.core.dist_checkpointing``, or run a script by
``python -m dist_checkpointing.interop.megatron script.py ...``, under torchrun too. The rest of
``megatron.core`` is the real one.
"""

from dist_checkpointing.interop.megatron.import_hook import install, uninstall

__all__ = ["install", "uninstall"]
