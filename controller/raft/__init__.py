"""Raft under the controller: pysyncobj 0.3.17 behind `ReplicatedLog`, with its faults fenced in.

Log, term, vote and snapshot of a node are in one folder, durable before another node learns of
them: what was acknowledged is there again after any restart, be it of all nodes at once.
"""
