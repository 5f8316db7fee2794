"""The program of a node: attach, agent, probe, and the step commands."""

from __future__ import annotations

import os
import sys
from typing import List, NoReturn

if __package__ in (None, ""):  # run as a directory or a file: `python3 .../hpcnode agent`
    _here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(_here), *(path for path in sys.path if path != _here)]


def main() -> int:
    """Run the subcommand that the first word names."""
    word, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if word == "attach":
        from hpcnode.agent import attach

        return attach.main(rest)
    if word == "agent":
        from hpcnode.agent import command

        return command.main(rest)
    if word in ("hrun", "hrsh", "srun", "scontrol", "hpty", "htun"):
        _leave(_step_command(word, rest))
    if word == "probe":
        return _probe(rest)
    if word == "adopt":
        from hpcnode.agent import adopt

        return adopt.main(rest)
    sys.stderr.write("usage: hpcnode attach|agent|adopt|probe|hrun|hrsh|srun|scontrol ...\n")
    return 2


def _step_command(word: str, rest: List[str]) -> int:
    if word == "srun":
        from hpcnode.commands import srun

        return srun.main_on_node(rest[0], rest[1:])
    if word == "hpty":
        from hpcnode.commands import pty

        return pty.main(rest)
    if word == "htun":
        from hpcnode.commands import tunnel

        return tunnel.main(rest)
    if word == "scontrol":
        from hpcnode.commands import scontrol

        return scontrol.main(rest)
    sys.argv[:] = [word, *rest]
    if word == "hrun":
        from hpcnode.commands import hrun

        return hrun.main()
    from hpcnode.commands import hrsh

    return hrsh.main()


def _leave(code: int) -> NoReturn:
    """Exit without Python's cleanup, which takes a quarter of a step command's time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _probe(argv: List[str]) -> int:
    import json

    from hpcnode.agent import probe

    root = argv[0] if argv else os.getcwd()
    print(json.dumps(probe.facts(root, os.environ, ()), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
