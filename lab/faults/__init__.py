"""Every fault that a cluster must survive, injected into real processes under load.

`python -m lab.faults table` measures each fault many times, `python -m lab.faults soak` injects
them at random for as long as wanted; `lab.faults.aftermath` compares Spark's view of them with a
record. The cluster is observed from outside: processes run as `batonmq up` starts them, and a probe
writes by frames of its own (`lab.cluster.probe`).

`trial` has the shape of a fault, injects one and runs the checkers, `catalogue` lists all (`kills`,
`cuts`, `slaves`, `disks`, `failing`, `midway`, `harmless`), `table` measures them. In `soak`,
consumer groups read along (`consumers`): each is given every acknowledged message.
"""
