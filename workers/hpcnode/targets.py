"""Where the streams of a step go: --output, --error and --input of hrun, and those of the parts of ``srun A : B``.

A file that several tasks share is written by hrun, one per task (%t %n %N) by the node that runs it; those of parts all by hrun.
"""

from __future__ import annotations

import json
import os
import re
from typing import Dict, List, Mapping, Optional, Sequence

from hpcnode import protocol

_PATTERN = re.compile(r"%(%|\d*[A-Za-z])")
_OF_TASK = re.compile(r"%(%|(\d{0,2})([tnN]))")
STREAMS = {"output": 1, "error": 2}


class Target:
    """Where one of the three streams goes: to or from hrun itself, a file of hrun's, or a file on the node."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.is_default = not text
        self.to_all = text == "all"
        self.task: Optional[int] = None  # the only task that takes part
        self.node_file = ""
        self.local_file = ""
        if text == "none":
            self.node_file = os.devnull
        elif text.isdigit():
            self.task = int(text)
        elif any(word[-1] in "tnN" for word in _PATTERN.findall(text)):
            self.node_file = text
        elif text and text != "all":
            self.local_file = text
            self.to_all = True

    def wants(self, task: int) -> bool:
        """Return whether the task's output is shown."""
        return self.task in (None, task)


class PartFiles:
    """The files of the parts of a step, in the order of the parts: ``ntasks``, ``output``, ``error``, as strings."""

    def __init__(self, parts: Sequence[Mapping[str, str]]) -> None:
        self._parts = parts

    @classmethod
    def read(cls, text: str, usual: Mapping[str, str]) -> Optional["PartFiles"]:
        """Return those that JSON names; None for "". `usual`: the files of parts that name none."""
        if not text:
            return None
        parts: List[Mapping[str, str]] = json.loads(text)
        return cls([{**usual, **part} for part in parts])

    def patterns(self, started: protocol.StepStarted) -> Dict[int, Dict[int, str]]:
        """Return by descriptor and task which file its output goes to, "" for hrun's own; what is of the task is filled in."""
        nodes = {rank: (name, at) for at, (name, ranks, _) in enumerate(started.parts()) for rank in ranks}
        found: Dict[int, Dict[int, str]] = {fd: {} for fd in STREAMS.values()}
        first = 0
        for part in self._parts:
            for task in range(first, first + int(part["ntasks"])):
                for name, fd in STREAMS.items():
                    text = part[name] or part["output"]
                    found[fd][task] = _filled(text, task, *nodes[task]) if text != "all" else ""
            first += int(part["ntasks"])
        return found


def _filled(pattern: str, task: int, node: str, node_rank: int) -> str:
    facts = {"t": str(task), "n": str(node_rank), "N": node}

    def value(match: "re.Match[str]") -> str:
        if match.group(1) == "%":
            return "%%"  # the other letters are filled in later
        text = facts[match.group(3)]
        return text.zfill(int(match.group(2) or 0)) if text.isdigit() else text

    return os.devnull if pattern == "none" else _OF_TASK.sub(value, pattern)
