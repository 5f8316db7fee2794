"""halloc and salloc: allocate nodes to a job while a command or shell runs here.

The command has the environment of the job, so that `hrun` starts steps on its nodes. When the command or halloc ends, the job
ends; when the job is ended (time limit, hcancel), the command gets SIGHUP. The options are those of `hrun` that request a job.

Source: salloc(1), and its texts.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import select
import signal
import socket
import sys
import time
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import replace

import hpcsched
from hpcnode.commands import options as stepoptions
from hpcnode.commands import slurm_text
from hpcnode.commands.getopt_long import FLAG, OPTIONAL, VALUE
from hpcnode.commands.hrun import IMMEDIATE_S
from hpcnode.commands.options import StepOption
from hpcnode.commands.srun import SLURM_VERSION
from hpcnode.os import account as user
from hpcnode.os import rlimits
from hpcnode.wire import protocol, sockets
from hpcnode.wire.sockets import connect
from hpcsched import client
from hpcsched.errors import HpcschedError
from hpcsched.listing.text import clean
from hpcsched.model.spec import SIGNED_REQUEST
from hpcsched.model.units import parse_signal, whole_number
from hpcsched.steps.environment import with_users

_JOB = (
    *stepoptions.OF_A_JOB, "chdir", "gid", "help", "propagate", "quiet", "uid", "usage", "verbose", "version", "x11",
)  # fmt: skip
_DOES = {
    "chdir": "run the command in DIR; default: here",
    "job-name": "name of the job; default: the command's",
    "signal": "send the job's steps a signal S (60) seconds before the time limit",
    "propagate": "resource limits that the job's steps inherit from the command: ALL, NONE, NOFILE,STACK ...",
}
_HERE_ONLY = {  # not sent to the controller
    "chdir", "get-user-env", "gid", "help", "kill-command", "usage", "propagate", "quiet", "uid", "verbose", "version", "wait",
    "x11",
}  # fmt: skip
_OF_STEPS = {"label", "mpi", "unbuffered", "wait", "kill-on-bad-exit", "external-launcher", "no-kill"}
_VARIABLES = {"gres": "GRES", "switches": "REQ_SWITCH", "time": "TIMELIMIT", "verbose": "DEBUG"}
_WITH_VARIABLES = frozenset((
    "account", "constraint", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "hint", "immediate", "mem-per-cpu",
    "overcommit", "partition", "qos", "reservation", "spread-job", *_VARIABLES,
))  # fmt: skip


def _variables(option: StepOption) -> tuple[str, ...]:
    """Return the variable with the default of an option."""
    if option.name not in _WITH_VARIABLES:
        return ()
    return ("SALLOC_" + _VARIABLES.get(option.name, option.name.upper().replace("-", "_")),)


# fmt: off
OPTIONS = (
    *(option._replace(help=_DOES.get(option.name, option.help), env=_variables(option)) for option in stepoptions.OPTIONS
      if option.name in _JOB or (option.accepted and option.name not in _OF_STEPS)),
    StepOption("get-user-env", "", OPTIONAL, "[SECONDS][S|L]",
               "run the command with the environment of a login shell (S: of a plain shell)"),
    StepOption("kill-command", "K", OPTIONAL, "SIGNAL",
               "signal for the command when the job ends: TERM, or SIGNAL; without the option, HUP"),
    StepOption("no-shell", "", FLAG, "", "run no command: the job lasts until it is cancelled or reaches its time limit"),
    StepOption("wait", "W", VALUE, "SECONDS", "wait at most this long for the nodes, like --immediate=SECONDS"),
    *(StepOption(name, "", kind, "", "accepted", (), True)
      for name, kind in (("bell", FLAG), ("no-bell", FLAG), ("wait-all-nodes", VALUE))),
)
# fmt: on
_RESERVED = re.compile(r"HPCSCHED_(?!CONFIG\Z|API\Z)|SLURM_(?!TIME_FORMAT\Z|CONF\Z)|SLURMD_")
_USER_ENV = re.compile("([0-9]{0,4})([SsLl]?)")
USER_ENV_S = 10
_REPORTED_AFTER_S = 0.5
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU)

Face = namedtuple(
    "Face", "name version usage_code refused"
)  # refused: the first words about a refused job, from the error
HALLOC = Face("halloc", None, 2, lambda text: "")
SALLOC = Face("salloc", f"slurm {SLURM_VERSION}", 1, slurm_text.of_allocation)


class HallocError(Exception):
    """The allocation failed; the text is for the user."""


def main(argv: Sequence[str] | None = None, face: Face = HALLOC) -> int:
    """Run halloc and return the exit status of its command."""
    try:
        values, command = _parse(sys.argv[1:] if argv is None else argv)
    except stepoptions.OptionError as error:
        return _complain(face, error.text(face.name), face.usage_code)
    if values.get("help"):
        what = "Allocate the nodes of a job while a command (by default a shell) runs on this machine."
        sys.stdout.write(stepoptions.usage(face.name, "[: OPTIONS]... [COMMAND [ARGUMENT...]]", what, OPTIONS))
        return 0
    if values.get("usage"):
        sys.stdout.write(stepoptions.short_usage(face.name, "[COMMAND [ARGUMENT...]]", OPTIONS))
        return 0
    if values.get("version"):
        print(face.version or f"hpcsched {hpcsched.__version__}")
        return 0
    try:
        client.must_be_local(face.name)
        _change_user(values)
        return _Allocation(face, values, command).run()
    except (HallocError, HpcschedError, user.UserError, sockets.NotFound, protocol.WireError) as error:
        return _complain(face, str(error), 1)


def salloc(argv: Sequence[str] | None = None) -> int:
    """Run salloc and return its exit status."""
    return main(argv, SALLOC)


def hold_for_step() -> int:
    """Run on behalf of the step command named by the first word, which needs a job first."""
    name, *words = sys.argv[1:]
    return main(words, HALLOC._replace(name=name, usage_code=1, refused=lambda text: slurm_text.of_step(0, text)))


def sign_step() -> None:
    """Sign the step on standard input (JSON), and print the variables that it gets."""
    from hpcsched.cli.process import signer  # few clusters need them
    from hpcsched.jobscript import signing

    asked = json.load(sys.stdin)
    env = {name: value for name, value in with_users(asked["env"], {}).items() if name != SIGNED_REQUEST}
    more = {"PATH": env.get("PATH", signing.DEFAULT_PATH), signing.SALT: os.urandom(16).hex()}
    try:
        by = signer()
        if asked["job_id"]:  # it starts soon
            by = replace(by, valid_s=min(by.valid_s, signing.STEP_VALID_S))
        text = signing.signed_step(asked["argv"], asked["work_dir"], {**env, **more}, asked["files"], by)
    except HpcschedError as error:
        sys.exit(f"hpcsched: {clean(str(error))}")
    print(json.dumps({**more, SIGNED_REQUEST: text}))


def _change_user(values: stepoptions.Values) -> None:
    if "gid" in values:
        user.refuse_group()
    if "uid" in values:
        sockets.steps_socket(os.environ, os.getuid())  # another user may be unable to read the modules that it imports
        user.change(str(values["uid"]))


def _parse(argv: Sequence[str]) -> tuple[stepoptions.Values, list[str]]:
    """Return options and command; in A : B, the later components become an option.

    Raises OptionError.
    """
    values, command = stepoptions.parse(argv, OPTIONS)
    components, command = _components(values, command)
    for option in OPTIONS:
        found = next(filter(None, map(os.environ.get, option.env)), "")
        if found and option.name not in values:
            on = option.kind == VALUE or found.lower() not in ("0", "no", "false")
            values.update({option.name: found if option.kind != FLAG else True} if on else {})
    stepoptions.refuse_windows(values)
    if "wait" in values:
        values.setdefault("immediate", values["wait"])
    if "propagate" in values:
        given = values["propagate"]
        values["propagate"] = stepoptions.resource_limits(given if isinstance(given, str) else rlimits.ALL)
    return ({**values, "components": json.dumps(components)} if components else values), command


def _components(values: stepoptions.Values, command: list[str]) -> tuple[list[stepoptions.Values], list[str]]:
    """Return the options of each component after the first one, and the command.

    Raises OptionError.
    """
    components: list[stepoptions.Values] = []
    while command[:1] == [":"]:
        own, command = stepoptions.parse(command[1:], OPTIONS)
        own = {
            name: value
            for name, value in own.items()
            if value != values.get(name) or name in stepoptions.OF_A_COMPONENT
        }
        strange = [name for name in own if name not in stepoptions.OF_A_COMPONENT]
        if strange:
            raise stepoptions.OptionError(
                f"cannot give component {len(components) + 1} of the job its own --{strange[0]}: all components have that of the "
                "first one; leave it out"
            )
        components.append({name: True if name == "exclusive" else value for name, value in own.items()})
    return components, command


class _Allocation:
    """One allocation: request it, wait for it, run the command, release it."""

    def __init__(self, face: Face, values: stepoptions.Values, command: Sequence[str]) -> None:
        self._face = face
        self._values = values
        self._quiet = values.get("quiet") is True
        self._is_shell = not command
        self._command = list(command) or [os.environ.get("SHELL") or "/bin/sh"]
        self._work_dir = os.path.abspath(str(values.get("chdir", "")) or os.getcwd())
        self._framer = protocol.Framer()
        self._wakeup, wakeup_in = socket.socketpair()
        self._wakeup_in = wakeup_in  # keep it open
        for end in (self._wakeup, wakeup_in):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_in.fileno(), warn_on_full_buffer=False)
        self._signals: list[int] = []
        self._child = 0
        given = values.get("kill-command")
        self._end_signal = parse_signal(given) if isinstance(given, str) else signal.SIGTERM if given else signal.SIGHUP

    def run(self) -> int:
        path = sockets.steps_socket(os.environ, os.getuid())
        try:
            self._sock = connect(path)
        except OSError as error:
            todo = "start it with 'hpcsched up'; 'hpcsched doctor' says what is wrong"
            text = f"Unable to contact hpcsched controller ({path}: {error.strerror}): {todo}"
            raise HallocError(text) from None
        for number in (*_ENDING, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda got, _frame: self._signals.append(got))
        self._sock.sendall(protocol.encode(self._request()))
        allocated = self._wait_for_nodes()
        self._report(f"Granted job allocation {allocated.job_id}")
        if self._values.get("no-shell"):
            self._sock.close()
            return 0
        try:
            return self._hold(allocated)
        finally:
            self._report(f"Relinquishing job allocation {allocated.job_id}")
            self._sock.close()

    def _request(self) -> protocol.StepRequest:
        options = {
            option.name: self._values[option.name]
            for option in OPTIONS
            if option.name in self._values and option.name not in _HERE_ONLY and not option.accepted
        }
        if "exclusive" in options:
            options["exclusive"] = True
        if options.get("nice") is True:
            options["nice"] = "100"
        if self._values.get("no-shell"):
            options["no-shell"] = True
        if "components" in self._values:
            options["components"] = self._values["components"]
        if self._is_shell:
            options.setdefault("job-name", "interactive")
        return protocol.StepRequest(
            version=protocol.VERSION,
            job_id=0,
            options={**options, "shell": True},
            argv=self._command,
            work_dir=self._work_dir,
            env={},
        )

    def _wait_for_nodes(self) -> protocol.JobAllocated:
        text, timeout_s = "", None
        given_up_s = None
        if "immediate" in self._values:
            given = self._values["immediate"]
            given_up_s = time.monotonic() + whole_number(
                given if isinstance(given, str) else IMMEDIATE_S, "--immediate"
            )
        while True:
            if given_up_s is not None:
                left_s = given_up_s - time.monotonic()
                if left_s <= 0:
                    raise HallocError("Unable to allocate resources: Requested nodes are busy")
                timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
            message = self._next(timeout_s)
            if isinstance(message, protocol.JobAllocated):
                return message
            if isinstance(message, protocol.StepEnded):
                first = self._face.refused(message.error)
                if first:
                    _complain(self._face, first, 1)
                raise HallocError(message.error)
            if isinstance(message, protocol.StepWaiting):
                text, timeout_s = message.text, _REPORTED_AFTER_S
            elif message is None and text:
                self._report(text)
                text, timeout_s = "", None
            if any(number != signal.SIGCHLD for number in self._signals):
                raise HallocError("cancelled while waiting for the job's nodes")

    def _next(self, timeout_s: float | None) -> protocol.Message | None:
        """Return the next message of the controller; None after a signal or at the deadline."""
        ready, _, _ = select.select([self._sock, self._wakeup], [], [], timeout_s)
        if self._wakeup in ready:
            self._wakeup.recv(512)
        if self._sock not in ready:
            return None
        data = self._sock.recv(1 << 16)
        if not data:
            self._hang_up()
            raise HallocError("lost the connection to the controller: the job has ended")
        messages = [message for message, _ in self._framer.feed(data)]
        return next(
            (message for message in messages if not isinstance(message, protocol.StepWaiting)),
            messages[0] if messages else None,
        )

    def _hold(self, allocated: protocol.JobAllocated) -> int:
        """Run the command to its end, and return its exit status."""
        self._child = self._start(self._environment(allocated))
        for number in _TERMINAL:
            signal.signal(number, signal.SIG_IGN)  # the signals of the terminal are for the command
        revoked = False
        while True:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return 1 if revoked else code if code >= 0 else 128 - code
            for signum in [signum for signum in self._signals if signum in _ENDING]:
                os.kill(self._child, signum)
            self._signals.clear()
            if revoked:
                select.select([self._wakeup], [], [])
                self._wakeup.recv(512)
                continue
            message = self._next(None)
            if isinstance(message, protocol.StepEnded):
                revoked = True
                _complain(self._face, message.error, 1)
                self._hang_up()

    def _environment(self, allocated: protocol.JobAllocated) -> dict[str, str]:
        """Return the environment of the command."""
        environ = _login_environment(self._values["get-user-env"]) if "get-user-env" in self._values else os.environ
        env = {name: value for name, value in environ.items() if _RESERVED.match(name) is None}
        if "propagate" in self._values:
            env["SLURM_PROPAGATE"] = str(self._values["propagate"])
        return {**env, **allocated.env}

    def _start(self, env: Mapping[str, str]) -> int:
        try:
            os.chdir(self._work_dir)
            ours = (*_ENDING, signal.SIGINT, signal.SIGCHLD)
            return os.posix_spawnp(self._command[0], self._command, env, setsigdef=ours)
        except OSError as error:
            raise HallocError(f"cannot run {self._command[0]}: {error.strerror}") from None

    def _hang_up(self) -> None:
        if self._child:
            os.kill(self._child, self._end_signal)
            os.kill(self._child, signal.SIGCONT)

    def _report(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"{self._face.name}: {text}\n")
            sys.stderr.flush()


def _login_environment(how: str | bool) -> dict[str, str]:
    """Return the environment of a login shell of this user; `how` is [SECONDS][S|L].

    Raises HallocError.
    """
    import subprocess  # rarely needed

    found = _USER_ENV.fullmatch(how) if isinstance(how, str) else _USER_ENV.fullmatch("")
    if found is None:
        raise HallocError(f"cannot read --get-user-env={str(how)[:40]}: write [SECONDS][S|L]")
    account = pwd.getpwuid(os.getuid())
    few = {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name, "SHELL": account.pw_shell}
    own = {name: os.environ[name] for name in ("PATH", "TERM", "HPCSCHED_CONFIG") if name in os.environ}
    command = [account.pw_shell or "/bin/sh", *(["-l"] if found[2].upper() != "S" else []), "-c", "env -0"]
    limit_s = whole_number(found[1], "--get-user-env") if found[1] else USER_ENV_S
    try:
        run = subprocess.run(command, env={**own, **few}, capture_output=True, timeout=limit_s, check=True, cwd="/")
    except subprocess.TimeoutExpired:
        advice = f"allow its profile more than {limit_s} s: --get-user-env={max(60, 10 * limit_s)}{found[2]}"
        raise HallocError(f"cannot get the environment of {account.pw_name}'s login shell: {advice}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise HallocError(f"cannot get the environment of {account.pw_name}'s login shell: {error}") from None
    pairs = (entry.partition("=") for entry in run.stdout.decode("utf-8", "surrogateescape").split("\0"))
    return {**own, **{name: value for name, equals, value in pairs if equals}}


def _complain(face: Face, text: str, code: int) -> int:
    sys.stderr.write(f"{face.name}: error: {text}\n")
    return code
