"""`edgeqwen stats`: what the daemon is doing."""

from __future__ import annotations

import json

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to


@click.command("stats", short_help="Show what the running daemon is doing.")
@socket_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(socket_path: str | None, *, as_json: bool) -> None:
    """Requests, tokens, speeds and memory of the running daemon.

    Root, the daemon's own user and the group edgeqwen-admin see everybody's requests, all others their own.
    """
    from edgeqwen.client import Client

    with Client.connect(socket_to_connect_to(socket_path)) as client:
        frame = client.request("stats")
    facts = {key: value for key, value in frame.items() if key not in {"id", "done"}}
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        if isinstance(value, list):
            click.echo(f"{key:16} {len(value)}")
        elif isinstance(value, dict):
            for name, number in value.items():
                click.echo(f"{key + '.' + name:16} {number}")
        else:
            click.echo(f"{key:16} {value}")
