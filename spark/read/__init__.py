"""Reading stores and histories: planned, decoded and filtered into Arrow batches. Free of Spark."""
