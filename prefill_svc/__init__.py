"""Prefill member: turns prompts into KV pages and hands them over."""
