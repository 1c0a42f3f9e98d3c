"""Tables that follow a stream, each message or event once; `docs/spark-tables.md`.

`table_stream` runs the query and decides what is new. `stream` is its case of a topic: `fields` and
`bodies` know types and formats, `rows` makes rows of messages, `files` writes them in tasks,
`table_formats` commits them, `proof` compares a table with the log. `history_stream` is its case of
the history, with `parquet_table`.
"""
