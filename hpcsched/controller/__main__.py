"""hpcschedd: the controller's daemon. Reads the configuration, takes the lock, opens the database, and serves."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from pathlib import Path

import click

import hpcsched
from hpcsched import paths
from hpcsched.config import Config, load_config
from hpcsched.errors import HpcschedError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_dir", metavar="DIR", type=click.Path(path_type=Path), help="Configuration directory.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much to say on stderr (default: log_level of the configuration).",
)
@click.version_option(hpcsched.__version__, "-V", "--version", prog_name="hpcschedd")
def command(config_dir: Path | None, log_level: str | None) -> None:
    """Run the hpcsched controller in the foreground until SIGTERM or SIGINT. Jobs run on when it ends."""
    gc.disable()  # what a start makes is no garbage: the daemon enables it when all is there
    config = load_config(config_dir or paths.find_config_dir(os.environ, os.getuid()))
    logging.basicConfig(
        level=(log_level or config.controller.log_level).upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    sys.exit(asyncio.run(_serve(config)))


async def _serve(config: Config) -> int:
    from hpcsched.controller.opening import serve

    return await serve(config)


def main() -> None:
    """Run the command, with errors for people on stderr."""
    try:
        command(prog_name="hpcschedd")
    except HpcschedError as error:
        print(f"hpcschedd: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
