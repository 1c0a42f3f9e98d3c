"""The data pipeline: stores, histories and messages as Spark data frames.

`spark.source` is the data source `format("batonmq")`; beside it only `spark.session`,
`spark.predicates` and what is built on them import pyspark. The other modules turn bytes into
Arrow columns with numpy and pyarrow and know nothing of Spark.
"""
