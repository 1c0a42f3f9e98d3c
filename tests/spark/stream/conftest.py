"""`tests/process` is put on the path for the cluster that its tests use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "process"))
