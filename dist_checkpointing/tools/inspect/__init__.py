"""What a checkpoint holds, found out by looking: lists, values, differences. On one machine.

Each module answers one question with frozen values and prints nothing; ``dckpt`` shows them.
``listing`` and ``inventory`` need no torch.
"""
