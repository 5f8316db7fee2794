"""A call of hsub, hqueue or hcancel in the command's own process."""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpcnode.os import rlimits
from hpcsched import client
from hpcsched.cli.output import is_terminal, note, outlive_its_end, terminal_width
from hpcsched.commands.call import Call, Caller, Json
from hpcsched.errors import RequestError, UnavailableError, UnsignedError
from hpcsched.jobscript.script import MAX_SCRIPT_BYTES
from hpcsched.listing.text import clean
from hpcsched.model.codec import spec_to_json
from hpcsched.model.frozen import replace
from hpcsched.model.spec import JobSpec
from hpcsched.steps.environment import with_users

if TYPE_CHECKING:
    from hpcsched.jobscript.signing import Signer

T = TypeVar("T")


def own_call(work_dir: str = "") -> Call:
    """Return a call by this process. `work_dir`: its directory, for commands that need it."""
    is_remote = client.is_remote()
    caller = Caller(
        environ=dict(os.environ) if is_remote else rlimits.environment(),
        uid=os.getuid(),
        user=client.my_name(),
        host=os.uname().nodename,
        work_dir=work_dir,
        width=terminal_width(),
        out_is_terminal=is_terminal(),
        err_is_terminal=sys.stderr.isatty(),
        in_our_zone=True,
        is_remote=is_remote,
    )
    return Call(caller=caller, api=_Socket(), output=_Standard(), script=_read_script, in_own_process=True)


def finish(work: Coroutine[object, object, T]) -> T:
    """Return what `work` comes to.

    It must wait for nothing: in a process of its own everything is asked at once.
    """
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a command waits for something in its own process")


def work_dir() -> str:
    """Return the directory that this process runs in.

    On another machine than the cluster's: the user's home there. Raises RequestError.
    """
    if client.is_remote():
        return str(client.call("GET", "/v1/me").get("home") or "/")
    try:
        return os.getcwd()
    except OSError as error:
        raise RequestError(f"cannot submit from this directory: {error.strerror}") from None


def _read_script(path: str | None, at: int | None) -> str:
    """Return the text of the script; bytes that are not UTF-8 are kept for the later check."""
    try:
        if at is None or path is None:
            if sys.stdin.isatty():
                note(Path(sys.argv[0]).name, "reading the script from the terminal; end it with Ctrl-D")
            data = sys.stdin.buffer.read(MAX_SCRIPT_BYTES + 1)
        else:
            with open(path, "rb") as stream:
                data = stream.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise RequestError(f"cannot read script {clean(path)}: {error.strerror}") from None
    return data.decode("utf-8", "surrogateescape")


def submit_jobs(request_id: str, specs: Sequence[JobSpec]) -> Json:
    """Submit the jobs, signed if the cluster wants that; return the answer.

    Raises as `client.call_again`.
    """
    body = {"request_id": request_id, "jobs": [spec_to_json(spec) for spec in specs]}
    try:
        return client.call_again("POST", "/v1/submit", body)
    except UnsignedError:
        from hpcsched.jobscript.signing import signed_job  # slow to import, and most clusters do not want it

        by = signer()
        # Variables that a job does not get are not signed.
        ready = [signed_job(replace(spec, env=tuple(with_users(dict(spec.env), {}).items())), by) for spec in specs]
        return client.call_again("POST", "/v1/submit", {**body, "jobs": [spec_to_json(spec) for spec in ready]})


def signer() -> Signer:
    """Return this user, who signs now. Raises ConfigError, RequestError, UnavailableError."""
    from hpcsched.jobscript.signing import Signer, own_key, valid_s

    me = client.call("GET", "/v1/me")
    return Signer(
        key=own_key(me["user"], may_make=not client.is_remote()),
        user=me["user"],
        uid=me["uid"],
        cluster=client.call("GET", "/v1/ping")["cluster"],
        now_s=time.time(),
        valid_s=valid_s(os.environ),
    )


class _Standard:
    """The standard output and error of this process."""

    def out(self, text: str) -> None:
        sys.stdout.write(text)

    def err(self, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(text)


class _Socket:
    """The API, by the controller's socket. Raises as `hpcsched.client` does."""

    async def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Json:
        return client.call("GET", client.query(path, **(parameters or {})))

    async def text(self, path: str, parameters: Mapping[str, str]) -> str:
        return client.fetch_text(client.query(path, **parameters))

    async def job(self, reference: str) -> Json:
        return client.call("GET", client.job_path(reference))

    async def cancel(self, body: Json) -> Json:
        if body["signal"] is None:
            outlive_its_end()
        return client.call("POST", "/v1/cancel", body)

    async def submit(self, request_id: str, spec: JobSpec) -> Json:
        try:
            return submit_jobs(request_id, [spec])
        except client.BrokenConnectionError as error:
            raise UnavailableError(
                f"{error}; the job may be in the queue already: to submit it for sure and once, "
                f"add --request-id={request_id}"
            ) from None

    def is_account(self, name: str) -> bool:
        if client.is_remote():
            return True  # the controller knows
        try:
            pwd.getpwnam(name)
        except KeyError:
            return False
        return True

    def job_id_of(self, reference: str) -> int:
        job = client.call("GET", client.job_path(reference))["jobs"][0]
        return int(job["array_job_id"] or job["id"])
