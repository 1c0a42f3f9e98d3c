"""A cluster lives through mixed failovers; Spark's jobs tell from what it left what happened.

`python -m faults.aftermath` (`make demo-spark`) does faults of the laboratory to a cluster under
load and keeps a record of them; a stream takes the history topic down meanwhile. Then the cluster
is stopped, the jobs read its histories and stores, and what they say is held against the record and
against the list of acknowledged writes.

It lives here because the laboratory has the faults, the load and the checkers, and stands above
`spark`. The jobs run as processes of their own, as for an operator; nothing of PySpark is imported.

`deeds` are the faults, `readers` two groups of consumers, `record` what was done, `jobs` the
processes of Spark, `tables` what they wrote, `compare` (pure) whether that agrees, `verdict` and
`summary` (pure) what came of it and how it is shown, `run` the order of it all.
"""
