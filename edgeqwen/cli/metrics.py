"""`edgeqwen metrics`: what the daemon measures, as Prometheus reads it."""

from __future__ import annotations

import click

from edgeqwen.cli.places import socket_option, socket_to_connect_to


@click.command("metrics", short_help="Print what the running daemon measures, as Prometheus reads it.")
@socket_option
def command(socket_path: str | None) -> None:
    """Counters, gauges and histograms of the running daemon in Prometheus' text format, as GET /metrics gives them.

    They tell of everybody together, so they are for root, the daemon's own user and the group edgeqwen-admin, unless
    the configuration says http.metrics = "all".
    """
    from edgeqwen.client import Client

    with Client.connect(socket_to_connect_to(socket_path)) as client:
        click.echo(client.metrics(), nl=False)
