"""What a checkpoint holds: lists, values and differences. On one machine.

The modules return values and print nothing; ``dckpt`` prints them. ``listing`` and ``inventory`` do
not import torch.
"""
