"""Stores in the tools that people train with: one module for each tool, which gives what the tool's own training loop asks for.

    from saev_store.integrations.saelens import data_provider

Nothing is imported here. docs/integrations.md has a section for each tool.
"""

from __future__ import annotations
