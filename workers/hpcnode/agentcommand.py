"""The agent as a command: its words, its log, and whom it tells why it cannot run.

Its words come from `attach`, not from people. It does not know what an agent does.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Dict, List

from hpcnode.agent import IDLE_S, Agent, AgentError, log
from hpcnode.lossy import LossyLog

NEEDED = ("--root", "--cluster", "--node")
OPTIONS = (*NEEDED, "--idle-s", "--ready-fd")
USAGE = "usage: hpcnode agent --root R --cluster C --node N [--idle-s S] [--ready-fd N]"


def main(argv: List[str]) -> int:
    """Run the agent: `agent --root R --cluster C --node N [--idle-s S] [--ready-fd N]`."""
    try:
        given = _options(argv)
        root, cluster, node = given["--root"], given["--cluster"], given["--node"]
        idle_s, ready_fd = float(given.get("--idle-s", IDLE_S)), int(given.get("--ready-fd", -1))
    except ValueError as error:
        sys.stderr.write("cannot start the agent: %s\n%s\n" % (error, USAGE))
        return 2
    sys.stderr = LossyLog(2)
    say = functools.partial(_say_why, ready_fd)
    try:
        agent = Agent(root=root, cluster=cluster, node=node, idle_s=idle_s, environ=os.environ)
        agent.run(ready_fd)
    except (AgentError, OSError) as error:
        say(str(error))
        return 1
    return 0


def _options(argv: List[str]) -> Dict[str, str]:
    """Return the words by their options. Not by argparse, which is a tenth of the memory that each fork would copy."""
    given = dict(zip(argv[::2], argv[1::2]))
    unknown = set(given).difference(OPTIONS)
    if unknown or len(argv) % 2:
        raise ValueError("unknown option or no value: %s" % " ".join(unknown or argv[-1:]))
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise ValueError("missing: %s" % " ".join(missing))
    return given


def _say_why(ready_fd: int, why: str) -> None:
    """Tell whoever waits for us, and the log."""
    log(why)
    if ready_fd >= 0:
        try:
            os.write(ready_fd, ("error: %s\n" % why).encode("utf-8", "surrogateescape"))
        except OSError:
            pass  # it was told already that we are ready, or has gone
