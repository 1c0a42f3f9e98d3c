"""Filters of subscriptions: tags, and SQL92 expressions, which are compiled and cached."""
