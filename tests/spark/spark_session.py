"""The one Spark session of the tests: small, silent, and stopped at the end."""

import warnings
from contextlib import contextmanager

from batonmq.spark.session import open_session
from tests.shared.ports import free_ports

# A query on a few rows costs its planning, and the code that Spark makes and compiles for it.
SMALL = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.constraintPropagation.enabled": "false",
}
CONNECT_PORT = "spark.connect.grpc.binding.port"
SETTINGS = SMALL | {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    # A Python process may take long to start while the machine has other work.
    "spark.python.authenticate.socketTimeout": "120s",
}


@contextmanager
def spark_session():
    """Starting one, with its JVM and its Python processes, costs as much as twenty tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        port = {CONNECT_PORT: str(free_ports(1))}
        made = open_session("tests", master="local[2]", settings=SETTINGS | port)
        made.sparkContext.setLogLevel("OFF")
        try:
            yield made
        finally:
            made.stop()
