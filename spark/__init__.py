"""The data pipeline: stores, histories and messages as Spark data frames.

`spark.source` is the data source `format("batonmq")`; beside it only `spark.session`
and what is built on the two import pyspark. The other modules turn bytes into Arrow columns with
numpy and pyarrow and know nothing of Spark.

What a user imports: `batonmq.spark.session`, `batonmq.spark.source`, `batonmq.spark.parquet_files`,
and, without a JVM, `batonmq.spark.arrow`. Jobs are commands, in `jobs/`.
"""
