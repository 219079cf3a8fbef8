"""Every address that fsspec knows."""
