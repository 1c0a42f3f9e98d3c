"""A topic kept as a Delta or Iceberg table, each message once; `docs/spark-tables.md`.

`fields` and `bodies` know types and formats, `rows` makes rows of messages, `files` writes them in
tasks, `tables` commits them, `stream` runs the query, `proof` compares a table with the log.
"""
