"""Version 1: the generated modules, and `role_view`, written by hand."""
