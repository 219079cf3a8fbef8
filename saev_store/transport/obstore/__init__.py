"""Object stores through obstore."""

from saev_store.transport.obstore._sink import part_bytes

__all__ = ["part_bytes"]
