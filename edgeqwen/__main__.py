"""`python -m edgeqwen` is the command `edgeqwen`."""

from __future__ import annotations

from edgeqwen.cli.main import main

if __name__ == "__main__":
    main()
