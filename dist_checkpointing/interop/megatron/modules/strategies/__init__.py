"""Megatron's ``strategies``."""
