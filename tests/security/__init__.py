"""Attacks by other users on a real daemon, next to an engine whose bytes are compared."""
