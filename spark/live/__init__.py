"""Topics of a running cluster: read by batches and streams, and written.

`offsets`, `ranges` and `limits` are the pure core; `cluster` queries a running one, `range_reader`
pulls and decodes; `topic_source` and `sink` are what Spark sees.
"""
