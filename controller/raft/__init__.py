"""Raft under the controller: pysyncobj 0.3.17 behind `ReplicatedLog`, with its faults corrected.

Log, term, vote and snapshot of a node are in one folder, and durable before another node learns of
them. So what was acknowledged survives any restart, also of all nodes at once (G7).
"""
