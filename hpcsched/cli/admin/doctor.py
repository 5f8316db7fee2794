"""`hpcsched doctor`: what is wrong with the cluster, a node or a job, and the remedy.

It needs no controller, no database and no configuration.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

import click

from hpcsched.cli.output import print_findings
from hpcsched.doctor.facts import COLLECTORS
from hpcsched.doctor.tree import JUDGES, Walk

JOB = re.compile(r"[0-9]+(_[0-9]+|\+[0-9]+)?\Z|last\Z")


def diagnose(subject: str, environ: Mapping[str, str]) -> Walk:
    """Return what is wrong with the cluster (""), a node, or a job, as seen from here."""
    if subject in ("", "cluster"):
        kind = "cluster"
    else:
        kind = "job" if JOB.match(subject) else "node"
    facts = COLLECTORS[kind](environ, *([subject] if kind != "cluster" else []))
    return JUDGES[kind](facts, time.time())


@click.command()
@click.argument("subject", metavar="[NODE|JOB]", default="")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(subject: str, as_json: bool) -> int:
    """Name what is wrong with the cluster, a node or a job, and the remedy.

    Without the controller, its database or the configuration, too. Exit status 0: nothing; 1: findings; 2: something could not
    be checked.
    """
    walk = diagnose(subject, os.environ)
    return print_findings(walk.findings, walk.unseen, as_json=as_json, well=walk.steps)
