"""`edgeqwen reload`: have the daemon read its configuration again."""

from __future__ import annotations

import json

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to


@click.command("reload", short_help="Have the running daemon read its configuration again.")
@socket_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(socket_path: str | None, *, as_json: bool) -> None:
    """Have the running daemon read its configuration file, and its API keys, again.

    Prints the keys that changed, and those that are to be different and wait for a restart. What is under way goes on
    as it began. Flags and environment that the daemon was started with still come before the file. If anything in it
    is wrong, nothing changes.

    For root, the daemon's own user and the group edgeqwen-admin. SIGHUP does the same.
    """
    from edgeqwen.client import Client

    with Client.connect(socket_to_connect_to(socket_path)) as client:
        frame = client.reload()
    facts = {kind: frame[kind] for kind in ("changed", "restart")}
    if as_json:
        click.echo(json.dumps(facts))
        return
    for kind, keys in facts.items():
        for key in keys:
            click.echo(f"{kind}  {key}")
    if not any(facts.values()):
        click.echo("nothing has changed")
