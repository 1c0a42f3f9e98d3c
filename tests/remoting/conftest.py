"""Property tests run without deadlines: the machine is shared and its speed proves nothing."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# The helper module `loopback` stands beside the tests, which are no package.
sys.path.insert(0, str(Path(__file__).parent))
