"""`hpcsched demo`: a small cluster on this machine trains a model and survives the loss of its controller and a node."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import click

from hpcsched.demo.keeper import stop_kept
from hpcsched.demo.show import DemoOptions, perform

DEFAULT_SECONDS = 100.0
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--keep", is_flag=True, help="Leave the cluster running at the end, and print how to use and end it.")
@click.option("--stop", metavar="DIR", type=_DIRECTORY, help="End the cluster that --keep left in DIR, and exit.")
@click.option(
    "--dir", "directory", metavar="DIR", type=_DIRECTORY, help="The cluster's directory.  [default: a new one]"
)
@click.option(
    "--server",
    type=click.Choice(["auto", "sshd", "embedded"]),
    default="auto",
    show_default=True,
    help="SSH server of the nodes: OpenSSH's sshd, or the one included in hpcsched.",
)
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(min=1),
    default=DEFAULT_SECONDS,
    show_default=True,
    help="How long the training takes.",
)
@click.option("--plain", is_flag=True, help="Print plain lines with times, as if the output is not a terminal.")
@click.option("--training", hidden=True, default="", help="Further options of the training program.")
def demo(
    keep: bool,
    stop: Path | None,
    directory: Path | None,
    server: Literal["auto", "sshd", "embedded"],
    seconds: float,
    plain: bool,
    training: str,
) -> int:
    """Show a small cluster at work on this machine, then remove it.

    Three nodes on loopback are reached through SSH, and two of them train a model. During the training the controller is
    killed, then a node loses power, and the training resumes from its last checkpoint. This takes about three minutes.
    The results are left in ./demo-out.
    """
    if stop is not None:
        stop_kept(stop.absolute())
        click.echo(f"the demo's cluster has ended, and {stop} is removed")
        return 0
    return perform(
        DemoOptions(
            keep=keep,
            directory=directory,
            server=server,
            seconds=seconds,
            plain=plain,
            training=_grouped(shlex.split(training)),
        )
    )


def _grouped(words: list[str]) -> tuple[str, ...]:
    """Return each option with its value as one text."""
    options: list[str] = []
    for word in words:
        if word.startswith("--") or not options:
            options.append(shlex.quote(word))
        else:
            options[-1] += " " + shlex.quote(word)
    return tuple(options)
