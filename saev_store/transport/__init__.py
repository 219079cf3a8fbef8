"""Transports read and write bytes on disks, in object stores and on servers, through one interface."""

from __future__ import annotations

from saev_store.transport.base import Entry, FileStat, Sink, Transport
from saev_store.transport.checks import Buffer, ReadCost
from saev_store.transport.local import LocalTransport
from saev_store.transport.open import Engine, open_transport

__all__ = ["Buffer", "Engine", "Entry", "FileStat", "LocalTransport", "ReadCost", "Sink", "Transport", "open_transport"]
