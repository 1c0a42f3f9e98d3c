"""Packages that `pip install batonmq` leaves out, and the extra that brings them."""

import sys
from importlib.util import find_spec
from typing import Final

#: Extra -> import name -> name for pip. `tests/packaging` compares it with pyproject.toml.
PACKAGES: Final = {
    "server": {
        "cryptography": "cryptography",
        "lark": "lark",
        "numpy": "numpy",
        "pysyncobj": "pysyncobj",
        "yaml": "pyyaml",
        "setproctitle": "setproctitle",
    },
    "otel": {"opentelemetry": "opentelemetry-api"},
    "otlp": {"opentelemetry.proto": "opentelemetry-proto"},
    "spark": {
        "duckdb": "duckdb",
        "jinja2": "jinja2",
        "jpype": "jpype1",
        "numpy": "numpy",
        "plotly": "plotly",
        "pyarrow": "pyarrow",
        "pyspark": "pyspark",
    },
}


def _find(name: str) -> object | None:
    try:
        return find_spec(name)
    except ModuleNotFoundError:  # of the package that it lies in
        return None


def lacking(extra: str) -> str:
    """Missing packages and how to install them, as `a, b: pip install ...`; empty if none is
    missing."""
    missing = [pip_name for name, pip_name in PACKAGES[extra].items() if _find(name) is None]
    return f"{', '.join(missing)}: pip install 'batonmq[{extra}]'" if missing else ""


def need_server(command: str) -> None:
    """Ends this process with exit code 2 if the servers lack a package."""
    missing = lacking("server")
    if missing:
        print(f"{command}: the servers need {missing}", file=sys.stderr)
        sys.exit(2)
