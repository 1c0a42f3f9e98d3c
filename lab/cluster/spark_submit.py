"""A job on a Spark of several processes, started by `spark-submit` with the wheel as `--py-files`.

The processes share nothing with this checkout but the files that the job is given.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.cluster.processes import ROOT


def spark_home() -> Path:
    """Where pyspark is installed. Raises ModuleNotFoundError if it is not."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pyspark")
    return Path(spec.origin).parent


def environment() -> dict[str, str]:
    """The environment without variables that would lead Python to the checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PY")}
    return {**kept, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def build_package(folder: Path) -> Path:
    """The wheel, built by pip's backend, under the name that `--py-files` takes."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel.rename(wheel.with_name("batonmq.zip"))


def submit(
    folder: Path, job: str, arguments: Sequence[object], *, package: Path, master: str, memory: str
) -> Any:
    """Runs the job's text in `folder` to its end; the JSON after RESULT in its output. Executors
    have one core each. Raises RuntimeError with the end of Spark's log."""
    folder.mkdir(exist_ok=True)
    file = folder / "job.py"
    file.write_text(job)
    argv = [
        str(spark_home() / "bin" / "spark-submit"),
        *("--master", master, "--py-files", str(package), "--driver-memory", memory),
        *("--conf", f"spark.executor.memory={memory}", "--conf", "spark.executor.cores=1"),
        *("--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=2"),
        *(str(file), *map(str, arguments)),
    ]
    done = subprocess.run(
        argv, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{master}: {done.stderr[-5000:]}")
