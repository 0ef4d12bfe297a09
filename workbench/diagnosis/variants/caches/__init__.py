"""Variants of what a KV cache holds."""
