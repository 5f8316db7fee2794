"""`hpcsched gateway` and `hpcsched web`: the API over the network, and links to it."""

from __future__ import annotations

import logging
import os
import socket

import click

from hpcsched import client, paths
from hpcsched.config.load import load_gateway
from hpcsched.errors import ConfigError


@click.command()
@click.option("--port", type=int, default=None, help="Another port than that of hpcsched.toml.")
@click.option("--insecure-loopback", is_flag=True, help="For development: without TLS, at 127.0.0.1 only.")
def gateway(port: int | None, insecure_loopback: bool) -> None:
    """Serve the API to the network over HTTPS, until a signal.

    See [gateway] in hpcsched.toml(5). Every request needs a credential: hctl token create.
    """
    from dataclasses import replace

    try:
        from hpcsched.gateway import server
    except ImportError as error:
        raise ConfigError(f"cannot run the gateway: {error.name} is missing: pip install 'hpcsched[web]'") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = load_gateway(paths.find_config_dir(os.environ, os.getuid()))
    if port is not None:
        settings = replace(settings, port=port)
    server.run(settings, paths.api_socket(os.environ, os.getuid()), insecure=insecure_loopback)


@click.command()
@click.option("--scope", default="read,submit,manage", help="What the session allows: read,submit,manage,admin.")
def web(scope: str) -> None:
    """Print a link that opens a session in a browser: once, within a minute."""
    answer = client.call("POST", "/v1/sessions/link", {"scopes": scope})
    url = (
        answer["url"]
        or f"https://{socket.getfqdn()}:{load_gateway(paths.find_config_dir(os.environ, os.getuid())).port}"
    )
    click.echo(f"{url}/login?code={answer['code']}")
