"""One call of hsub, hqueue or hcancel: its process, its access to the API, and its output.

The same code runs in the command's own process (`hpcsched.cli.process`) and in the controller on
its behalf (`hpcsched.api.command`). Neither this module nor the commands may therefore read files,
variables, clock, terminal or accounts of the process that runs them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpcsched.commands.options import Words, clusters_of, refuse_others
from hpcsched.model.spec import JobSpec

Json = dict[str, Any]


class OwnProcessError(Exception):
    """Only the command's own process can do this. Nothing was done yet.

    It has the terminal, the files or the time zone.
    """


class ScriptError(Exception):
    """The job script is needed. `at`: its place among the words, None for standard input."""

    def __init__(self, at: int | None) -> None:
        super().__init__(at)
        self.at = at


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The process that called a command."""

    environ: Mapping[str, str]
    uid: int
    user: str  # the account's name, or its number if it has none
    host: str
    work_dir: str
    width: int  # columns of the output's terminal, 0: unknown
    out_is_terminal: bool
    err_is_terminal: bool
    in_our_zone: bool  # its local time is that of the process that runs this code
    is_remote: bool = False  # it is on a machine without the cluster's files and accounts

    @property
    def wants_colour(self) -> bool:
        """Return whether output may be coloured: on a capable terminal without NO_COLOR."""
        environ = self.environ
        return self.out_is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


class Api(Protocol):
    """The API as commands use it. All methods raise HpcschedError.

    `by_controller` of the error is set if it is the API's own answer.
    """

    async def get(self, path: str, parameters: Mapping[str, str] = ...) -> Json: ...
    async def text(self, path: str, parameters: Mapping[str, str]) -> str: ...
    async def job(self, reference: str) -> Json: ...
    async def cancel(self, body: Json) -> Json: ...
    async def submit(self, request_id: str, spec: JobSpec) -> Json: ...
    def is_account(self, name: str) -> bool: ...
    def job_id_of(self, reference: str) -> int:
        """Return the id that was printed when `reference` (a name, or ``last``) was submitted."""
        ...


# Returns the text of a script: the word at this place among the words, or None and None for
# standard input. Raises ScriptError, RequestError.
ReadScript = Callable[[str | None, int | None], str]


class CommandOutput(Protocol):
    """Receives a command's output, line ends included."""

    def out(self, text: str) -> None: ...
    def err(self, text: str) -> None: ...


class Collected:
    """Output kept in the order of writing: file descriptors 1 and 2, and texts."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, str]] = []

    def out(self, text: str) -> None:
        self.parts.append((1, text))

    def err(self, text: str) -> None:
        self.parts.append((2, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a command.

    `in_own_process`: options that need files, the terminal or the time zone are possible.
    """

    caller: Caller
    api: Api
    output: CommandOutput
    script: ReadScript
    in_own_process: bool

    def only_in_own_process(self, words: Words, *options: str) -> None:
        """Raise OwnProcessError if one of these options was given to a call in the controller."""
        if not self.in_own_process and any(words.has(option) for option in options):
            raise OwnProcessError

    def needs_local_time(self) -> None:
        """Raise OwnProcessError if this process does not know the caller's local time."""
        if not (self.in_own_process or self.caller.in_our_zone):
            raise OwnProcessError

    def complain(self, name: str, text: str) -> None:
        """Write an error in the format of all commands."""
        self.output.err(f"{name}: error: {text}\n")

    def note(self, name: str, text: str) -> None:
        """Write a note for interactive users; nothing if standard error is not a terminal."""
        if self.caller.err_is_terminal:
            self.output.err(f"{name}: {text}\n")


# Runs one call and returns its exit status. Raises HpcschedError, OwnProcessError, ScriptError.
Entrance = Callable[[Sequence[str], Call], Awaitable[int]]


async def refuse_other_clusters(text: str, call: Call) -> None:
    """Raise RequestError if ``--clusters`` names a cluster other than the controller's."""
    if named := clusters_of(text):
        refuse_others(named, str((await call.api.get("/v1/ping"))["cluster"]))
