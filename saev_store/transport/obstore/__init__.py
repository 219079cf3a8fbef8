"""Object stores through obstore."""

from saev_store.transport.obstore._sink import upload_requests

__all__ = ["upload_requests"]
