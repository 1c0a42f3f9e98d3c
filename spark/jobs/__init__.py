"""The jobs: each module is a command, `python -m spark.jobs.NAME --help`."""
