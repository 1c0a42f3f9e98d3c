"""Puts `tests/remoting` on the path for its one helper module."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
