"""Replicas against each other: the table `differences` of the data source. Free of Spark."""
