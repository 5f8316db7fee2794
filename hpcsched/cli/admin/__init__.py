"""`hpcsched`: the commands that set up and run a cluster. Each is imported when it is run."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

import hpcsched
from hpcsched.cli.output import INTERRUPTED, guarded, print_version

# name -> module and object, and its short help, so that --help imports none of them
COMMANDS = {
    "init": ("hpcsched.cli.admin.init:init", "Create a cluster's configuration, database and launch key."),
    "key": ("hpcsched.cli.admin.init:key", "Print the line for the nodes' authorized_keys."),
    "ca": ("hpcsched.cli.admin.init:ca", "Let the launch key in with certificates of ten minutes."),
    "seal": ("hpcsched.cli.admin.backup:seal", "Show or rotate the keys that seal environments of jobs."),
    "node": ("hpcsched.cli.admin.lan:node", "Add, list, measure, rename and remove nodes."),
    "up": ("hpcsched.cli.admin.daemon:up", "Start the controller in the background."),
    "down": ("hpcsched.cli.admin.daemon:down", "Stop the controller; running jobs continue."),
    "status": ("hpcsched.cli.admin.daemon:status", "Report whether the controller is running, and its nodes and jobs."),
    "doctor": ("hpcsched.cli.admin.doctor:doctor", "Name what is wrong with the cluster, a node or a job."),
    "backup": ("hpcsched.cli.admin.backup:back_up", "Back up database, configuration, node files and keys."),
    "restore": ("hpcsched.cli.admin.backup:restore", "Restore the cluster, or its database, from a backup."),
    "upgrade": ("hpcsched.cli.admin.backup:upgrade", "Say what an upgrade to this version would do."),
    "slurm-path": ("hpcsched.cli.admin.shell:slurm_path", "Print the directory of the commands with Slurm's names."),
    "completion": ("hpcsched.cli.admin.shell:completion", "Print shell completion for bash, zsh or fish."),
    "top": ("hpcsched.cli.admin.hmon:hmon", "Show jobs, nodes and what is wrong, live (hmon)."),
    "plan": ("hpcsched.cli.admin.plan:plan", "Answer what fits, and what another machine would be worth."),
    "maintenance": ("hpcsched.cli.admin.plan:maintenance", "Find hours for maintenance, and reserve them."),
    "rolling": ("hpcsched.cli.admin.rolling:rolling", "Run a command on nodes in turn, each without jobs."),
    "gateway": ("hpcsched.cli.admin.daemon:gateway", "Serve the API to the network over HTTPS."),
    "web": ("hpcsched.cli.admin.daemon:web", "Print a link that opens a session in a browser."),
    "demo": ("hpcsched.demo.show:demo", "Show a small cluster at work on this machine, then remove it."),
}


REMOTE = (
    "top",
    "plan",
    "maintenance",
    "doctor",
)  # commands that ask the controller alone, so that they work through a gateway


class LazyGroup(click.Group):
    """A group whose commands are imported when they are run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, text) in COMMANDS.items()]
        rows += [(name, command.get_short_help_str(70)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(error.message + _nearest(args[0], self.list_commands(ctx)), ctx) from None


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else f" Known are {', '.join(known)}."


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpcsched.__version__, "-V", "--version", message="hpcsched (hpcsched) %(version)s")
@click.pass_context
def hpcsched_command(ctx: click.Context) -> None:
    """Set up and run a cluster: Slurm's job model for the machines you already own."""
    if ctx.invoked_subcommand not in REMOTE:
        os.environ.pop("HPCSCHED_URL", None)  # these are for this machine's cluster


@hpcsched_command.command()
def version() -> None:
    """Print the version."""
    print_version("hpcsched")


def run(command: click.Command, name: str, argv: Sequence[str] | None = None) -> int:
    """Run a click command with the error handling of all commands, and return its exit status."""
    return guarded(name, lambda words: _run_click(command, name, words), argv)


def _run_click(command: click.Command, name: str, words: Sequence[str]) -> int:
    try:
        result: Any = command.main(list(words), prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run `hpcsched` with the arguments of this process."""
    sys.exit(run(hpcsched_command, "hpcsched"))
