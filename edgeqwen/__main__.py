"""The command `edgeqwen`, also as `python -m edgeqwen`. Ctrl-C is no traceback either while the command is imported."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the installed command."""
    try:
        from edgeqwen.cli import main as command

        command.main()
    except KeyboardInterrupt:
        sys.exit(130)  # a literal: the interrupt may have come before the module that names it was imported


if __name__ == "__main__":
    main()
