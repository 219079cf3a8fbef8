"""Addresses that fsspec supports."""
