"""OCDBT, format version 0: a key-value database in a folder, as TensorStore reads and writes it.

A B+tree says in which file, and at which byte, the value of each key lies. All numbers below are
those of the format; nothing here knows what the keys and values mean.
"""
