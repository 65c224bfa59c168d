"""Decode member: turns KV pages into tokens and text."""
