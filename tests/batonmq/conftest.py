"""Makes `fake_cluster`, the scripted servers beside the tests, importable in importlib mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
