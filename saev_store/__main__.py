"""`python -m saev_store` is `saev-store`."""

from __future__ import annotations

import sys

from saev_store_command import main

if __name__ == "__main__":
    sys.exit(main())
