# %% [markdown]
"""A notebook over a running cluster and its files, as a script: editors and Jupyter (by jupytext)
show each `# %%` as a cell. It needs `pip install 'batonmq[spark]'` and a JDK 17; first let
producer.py send something."""

# %%
import argparse
import tempfile
from pathlib import Path

from pyspark.sql import functions as F

from batonmq.spark.session import open_session

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
parser.add_argument("--topic", default="ExampleOrders")
parser.add_argument("--data", type=Path, help="the folder of `batonmq up --data`, for its files")
parser.add_argument("--output", type=Path, help="a folder to write to; else a temporary one")
args, _ = parser.parse_known_args()  # a notebook's kernel has arguments of its own

spark = open_session("example")
live = {"table": "topic", "nameServers": args.name_servers, "topic": args.topic}
output = args.output or Path(tempfile.mkdtemp(prefix="batonmq-example-"))

# %% [markdown]
# A topic as a data frame: all that was acknowledged before the read was planned.

# %%
orders = spark.read.format("batonmq").options(**live).load()
orders.groupBy("tags").agg(F.count("*").alias("messages"), F.max("store_at")).show()
orders.select("keys", F.col("body").cast("string"), "queue_id", "queue_offset").show(5, False)

# %% [markdown]
# The same as a stream into Parquet, each message once, also through failovers. `availableNow` ends
# with what is there now; without it the stream continues.

# %%
query = (
    spark.readStream.format("batonmq")
    .options(**live, startingOffsets="earliest")
    .load()
    .writeStream.format("parquet")
    .option("checkpointLocation", str(output / "checkpoint"))
    .trigger(availableNow=True)
    .start(str(output / "orders"))
)
query.awaitTermination()
print("messages in the lake:", spark.read.parquet(str(output / "orders")).count())

# %% [markdown]
# Rows into a topic.

# %%
drinks = orders.groupBy("tags").count()
rows = drinks.select(F.col("tags").alias("keys"), F.to_json(F.struct("*")).alias("body"))
rows.write.format("batonmq").mode("append").options(
    nameServers=args.name_servers, topic=f"{args.topic}Summary"
).save()

# %% [markdown]
# The files of brokers and controllers need no running cluster: who was master when?

# %%
if args.data is not None:
    stores = str(args.data / "broker-*")
    epochs = spark.read.format("batonmq").option("table", "epochs").load(stores)
    epochs.select("store", "epoch", "start_offset", "end_offset").orderBy("epoch", "store").show()
    history = spark.read.format("batonmq").option("table", "history")
    events = history.load(str(args.data / "namesrv-*" / "controller"))
    events.filter("kind = 'elected'").select("time", "broker_id", "master_epoch", "reason").show()
