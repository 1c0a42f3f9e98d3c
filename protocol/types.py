"""Names for the integers that must not be mixed up: an id, an epoch, a place in the log."""

from typing import NewType

# 0 means "master" on RocketMQ's wire and "none" in our own controller contract; ids start at 1.
BrokerId = NewType("BrokerId", int)
# A masterEpoch or an epoch of the epoch file. 0: never elected; -1: no entry.
Epoch = NewType("Epoch", int)
# A byte position in the commit log of a broker group; an end offset is exclusive.
PhyOffset = NewType("PhyOffset", int)

__all__ = ["BrokerId", "Epoch", "PhyOffset"]
