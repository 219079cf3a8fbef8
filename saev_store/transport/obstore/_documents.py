"""Small objects through obstore: created, replaced, deleted. Coroutines that run in the client's loop."""

from __future__ import annotations

import asyncio
import contextlib

from saev_store.transport.obstore._client import ObstoreClient, is_busy

#: A longer document is sent in parts: two requests more, but what is lost on the way is less.
_MOST_PUT_AT_ONCE = 32 << 20
_BUSY_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8)


async def put(client: ObstoreClient, key: str, content: bytes) -> None:
    """Create or replace an object."""
    import obstore

    parted = len(content) > _MOST_PUT_AT_ONCE
    await client.slot(lambda: obstore.put_async(client.store, key, content, use_multipart=parted))
    client.requests.add("put", written=len(content))


async def create(client: ObstoreClient, key: str, content: bytes) -> None:
    """Create an object unless its name is taken; asked again where the service is busy with another such request."""
    import obstore

    async def attempt() -> None:
        for wait_s in (*_BUSY_WAITS_S, None):
            client.requests.add("create", written=len(content))
            try:
                await obstore.put_async(client.store, key, content, mode="create")
            except Exception as error:
                if wait_s is None or not is_busy(error):
                    raise
                await asyncio.sleep(wait_s)
            else:
                return

    await client.slot(attempt)


async def delete(client: ObstoreClient, key: str) -> None:
    """Delete an object, and everything below a folder of that name; fine if there is nothing."""
    import obstore

    async def itself() -> None:
        with contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(client.store, key)

    client.requests.add("delete")
    # It goes by whole parts of names: "a" finds "a/b", not "ab", and not "a" itself.
    listed = obstore.list(client.store, prefix=key)  # pyright: ignore[reportUnknownMemberType] (Arrow tables)
    _, below_it = await asyncio.gather(itself(), listed.collect_async())
    if found := [meta["path"] for meta in below_it]:
        await obstore.delete_async(client.store, found)
