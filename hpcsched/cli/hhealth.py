"""`hhealth`: one line per check, and an exit status for monitoring.

It can also drain and resume nodes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from hpcsched import client, health, paths
from hpcsched.cli.output import print_json, run_command, wants_colour
from hpcsched.client import Json
from hpcsched.commands.options import HELP, VERSION, Command, Option, UsageError, Words
from hpcsched.config.load import load_config
from hpcsched.errors import HpcschedError, PermissionDeniedError
from hpcsched.health import Check, Status, check_node, worst
from hpcsched.launch.visit import ShareProbe, share_probe
from hpcsched.listing.text import GREEN, RED, YELLOW, clean, painted

JSON_VERSION = 1

COMMAND = Command(
    name="hhealth",
    usage=("[options]",),
    about="Check the database, the share, the clock, the controller and every node.",
    options=(
        Option("quiet", "q", help="print only problems"),
        Option("json", help="print everything as one JSON object"),
        Option("drain", help="drain nodes that fail, with the reason"),
        Option("resume", help="resume nodes that hhealth drained and that pass the checks again"),
        HELP,
        VERSION,
    ),
    notes=("Exit status: 0 no problems; 1 a warning; 2 something is broken; 3 something could not be checked.",),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit."""
    sys.exit(run_command(COMMAND, _work, argv))


def _work(words: Words) -> int:
    if words.operands:
        raise UsageError(f"cannot take {words.operands[0]!r}: hhealth has options only")
    done: list[str] = []
    try:
        checks, views = look()
        if words.has("drain"):
            done += _drain(health.to_drain(views, checks))
        if words.has("resume"):
            _drain(health.to_drain_again(views, checks))
            done += _resume(health.to_resume(views, checks))
    except HpcschedError as error:
        checks = [Check(name="hhealth", status=Status.UNKNOWN, text=str(error))]
    if words.has("json"):
        print_json(_as_json(checks, done))
    else:
        _print(checks, done, quiet=words.has("quiet"))
    return int(worst(checks))


def look() -> tuple[list[Check], list[Json]]:
    """Return all checks, and the controller's view of the nodes, empty if it does not answer."""
    started = time.time(), time.monotonic()
    config = load_config(paths.find_config_dir(os.environ, os.getuid()))
    database = config.controller.state_dir / paths.DATABASE_FILE
    share = health.check_share(config.share) if config.share else None
    controller, *backups = health.check_controller()
    checks = [health.check_database(database), *([share] if share else []), controller, *backups]
    views: list[Json] = []
    if controller.status is Status.CRITICAL:
        text = "cannot be asked: the controller does not answer"
        checks += [Check(name="link", status=Status.UNKNOWN, text=text, node=spec.name) for spec in config.nodes]
    else:
        try:
            views = _views(config.share if share is not None and share.status is not Status.CRITICAL else "")
        except PermissionDeniedError as error:
            views = _ask(None)
            checks.append(Check(name="share of the nodes", status=Status.UNKNOWN, text=str(error)))
        checks += [check for view in views for check in check_node(view, time.time())]
    clock = health.check_clock(
        wall_s=(started[0], time.time()),
        monotonic_s=(started[1], time.monotonic()),
        last_commit_s=health.last_change_s(database),
    )
    return [*checks, clock], views


def _views(share: str) -> list[Json]:
    """Probe all nodes; each also compares a file that was just written to the share."""
    if not share:
        return _ask(None)
    with share_probe(share) as probe:
        return _ask(probe)


def _ask(share: ShareProbe | None) -> list[Json]:
    named = {"share_file": share.path.name, "share_sha256": share.sha256, "share_uid": share.uid} if share else {}
    answer = client.call("GET", client.query("/v1/nodes", probe=1, **named))
    nodes: list[Json] = answer["nodes"]
    return nodes


def _drain(nodes: dict[str, str]) -> list[str]:
    done = []
    for node, why in nodes.items():
        client.call("POST", "/v1/nodes/drain", {"nodes": node, "why": why, "by": health.BY})
        done.append(f"drained {node}: {why}")
    return done


def _resume(nodes: list[str]) -> list[str]:
    done = []
    for node in nodes:
        resumed = client.call("POST", "/v1/nodes/resume", {"nodes": node, "only_by": health.BY})["nodes"]
        done.append(f"resumed {node}" if resumed else f"{node} is well; hinfo -R says from when on it returns")
    return done


def _as_json(checks: Sequence[Check], done: Sequence[str]) -> Json:
    return {
        "version": JSON_VERSION,
        "status": worst(checks).name,
        "checks": [check.as_json() for check in checks],
        "done": list(done),
    }


def _print(checks: Sequence[Check], done: Sequence[str], *, quiet: bool) -> None:
    colours = {Status.OK: GREEN, Status.WARN: YELLOW, Status.CRITICAL: RED, Status.UNKNOWN: YELLOW}
    width = max(len(status.name) for status in Status)
    for check in checks:
        if quiet and check.status is Status.OK:
            continue
        word = check.status.name.ljust(width)
        word = painted(word, colours[check.status]) if wants_colour() else word
        print(f"{word} {check.subject}: {clean(check.text)}")
    for line in done:
        print(clean(line))
