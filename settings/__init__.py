"""Configuration files into typed sections, and back into RocketMQ's property text.

A file is YAML with one mapping per section, or RocketMQ's own flat `.conf`/`.properties`. Whatever
is not understood stops the start with the key, the value, the place and what is allowed.
"""

from settings.loader import load_settings
from settings.properties_text import dump_properties, parse_properties

__all__ = ["dump_properties", "load_settings", "parse_properties"]
