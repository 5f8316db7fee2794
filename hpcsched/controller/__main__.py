"""Run hpcschedd, the controller's daemon: configuration, lock, database, serve."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import click

import hpcsched
from hpcsched import paths
from hpcsched.config.load import Config, load_config
from hpcsched.controller.logfile import start_log
from hpcsched.errors import ConfigError, HpcschedError

PR_SET_DUMPABLE = 4  # prctl.h
M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK_BYTES = 1 << 20


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_dir", metavar="DIR", type=click.Path(path_type=Path), help="Configuration directory.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much to log (default: log_level of the configuration).",
)
@click.option(
    "--log-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the log to this file, which rotates (log_max_size, log_files), and not to stderr.",
)
@click.version_option(hpcsched.__version__, "-V", "--version", prog_name="hpcschedd")
def command(config_dir: Path | None, log_level: str | None, log_file: Path | None) -> None:
    """Run the hpcsched controller in the foreground until SIGTERM or SIGINT.

    Jobs run on when it ends.
    """
    gc.disable()  # objects of a start are not garbage; the daemon enables it afterwards
    config = load_config(config_dir or paths.find_config_dir(os.environ, os.getuid()))
    settings = config.controller
    try:
        start_log(log_level or settings.log_level, log_file, settings.log_max_size << 20, settings.log_files)
    except OSError as error:
        raise ConfigError(f"cannot write the log {log_file}: {error.strerror}") from None
    return_large_blocks()
    forbid_core_files()
    sys.exit(asyncio.run(_serve(config)))


def return_large_blocks() -> None:
    """Return freed blocks of 1 MiB and more to the system.

    By default, after the first such block, glibc keeps up to 32 MiB of each, in pieces.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def forbid_core_files() -> None:
    """Keep this process's memory out of core files and debuggers.

    It has the environments of users.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the limit does not count if a program gets the core


async def _serve(config: Config) -> int:
    from hpcsched.controller.opening import serve

    return await serve(config)


def main() -> None:
    """Run the command, and print errors for users on stderr."""
    os.umask(0o077)
    try:
        command(prog_name="hpcschedd")
    except HpcschedError as error:
        print(f"hpcschedd: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
