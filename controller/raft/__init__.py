"""Raft under the controller: pysyncobj 0.3.17 behind `ReplicatedLog`, with its faults fenced in.

The log lives in memory for now: a node that restarts fetches the state from the others, and what
all nodes forget at once is gone.
"""
