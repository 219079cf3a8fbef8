"""Packages with the names of other projects, for scripts that were written for them."""
