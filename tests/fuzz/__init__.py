"""Broken bytes for everything that reads bytes of others: of a network, of a disk, of an operator.

A target reads bytes in one process, without a server. Bytes are taken, or refused with the one
error that the reader's docstring names; anything else escapes and is a find, and so is a hang or
memory beyond a frame's limit. `python -m tests.fuzz --runs N TARGET` searches; each find is kept
under `found/TARGET/` and read again by `test_fuzz.py`.
"""
