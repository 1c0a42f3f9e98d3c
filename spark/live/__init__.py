"""Topics and the history of a running cluster: read by batches and streams, and topics written.

`offsets` is the pure core; `cluster` queries a running one, `range_reader` pulls and decodes;
`topic_read`, `stream_plan` and `history_feed` are what `spark.source` reads, `sink` is what Spark
writes by.
"""
