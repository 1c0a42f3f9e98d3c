"""How grave a finding is, in every job. Free of Spark."""

from typing import Final

CRITICAL: Final = "critical"
WARNING: Final = "warning"
INFO: Final = "info"
SEVERITIES: Final = (CRITICAL, WARNING, INFO)
"""The gravest first."""
