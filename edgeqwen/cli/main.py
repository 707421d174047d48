"""The `edgeqwen` command: finds the subcommand, runs it, and turns what went wrong into one line and an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import click

from edgeqwen import __version__
from edgeqwen.cli.streams import StreamFailed, complain, failures_named, open_missing
from edgeqwen.errors import EXIT_INTERRUPTED, EXIT_NO_INPUT, EXIT_USAGE, EdgeqwenError

COMMANDS: Final = {
    "ask": "edgeqwen.cli.ask",
    "batch": "edgeqwen.cli.batch",
    "bench": "edgeqwen.cli.bench",
    "chat": "edgeqwen.cli.chat",
    "config": "edgeqwen.cli.config",
    "doctor": "edgeqwen.cli.doctor",
    "embed": "edgeqwen.cli.embed",
    "eval": "edgeqwen.cli.evaluate",
    "import": "edgeqwen.cli.importing",
    "metrics": "edgeqwen.cli.metrics",
    "models": "edgeqwen.cli.models",
    "pull": "edgeqwen.cli.pull",
    "reload": "edgeqwen.cli.reload",
    "serve": "edgeqwen.cli.serve",
    "sessions": "edgeqwen.cli.sessions",
    "stats": "edgeqwen.cli.stats",
    "top": "edgeqwen.cli.top",
}
"""Name -> module; each has a `command`."""


class LazyGroup(click.Group):
    """Imports a subcommand's module when it is asked for, so that one command does not pay for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Help and version are printed in here."""
        with failures_named():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with failures_named():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgeqwen")
def group() -> None:
    """Qwen3-0.6B and small models of its family as a CPU daemon on a Unix socket."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code. What a user can cause is one line on stderr."""
    try:
        result = group.main(args=list(arguments), prog_name="edgeqwen", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        complain(error.format_message())
        return EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "edgeqwen"
        message = one_line(error.format_message()).removesuffix(".")
        complain(f"{where}: {message} (see `{where} --help`)")
        return EXIT_USAGE
    except StreamFailed as error:
        if not error.is_closed:
            complain(f"edgeqwen: {error.message}")
        return error.exit_code
    except EdgeqwenError as error:
        complain(f"edgeqwen: {one_line(error.message)}")
        return EXIT_NO_INPUT if error.code == "not_found" else error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> NoReturn:
    """The command as a process."""
    open_missing()
    sys.exit(run(sys.argv[1:]))
