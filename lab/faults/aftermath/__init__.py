"""Faults done to a cluster under load, then Spark's jobs over its histories and stores.

`python -m lab.faults.aftermath` (`make demo-spark`) injects faults one after the other, and keeps a
record; a stream copies the history topic meanwhile. Then the cluster is stopped. The jobs read its
histories and stores; their tables are compared with the record and with the list of acknowledged
writes.

It is in `faults`, which has the faults, the load and the checkers, and is above `spark`. The jobs
run as processes of their own, as for an operator; nothing of PySpark is imported.

`fault_records` has the order of the faults and the record of them, `jobs` runs the jobs, `tables`
is what they wrote, `compare` (pure) whether that agrees with the record, `summary` (pure) the
result and how it is shown, `run` the order of it all.
"""
