"""The fault laboratory: a real cluster, a probe outside it, and every fault it must survive.

`python -m faults table` measures each fault many times, `python -m faults soak` lets them happen at
random for as long as wanted. What is measured here is never imported here: processes are started
as `batonmq up` starts them and asked over the wire by frames made by hand (`bench.wire`).
"""
