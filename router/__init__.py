"""Admits, places, relays and repairs requests."""
