"""Makes the simulation's modules, which stand beside the tests, importable in importlib mode."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
