"""Where a client's requests go, and where its jobs come from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched import client as transport
from hpcsched.client import functions, https, jobs
from hpcsched.client.functions import FunctionCall
from hpcsched.client.https import GatewayEndpoint
from hpcsched.client.jobs import Prepared, SubmitPlace
from hpcsched.client.protocol import HttpReply, Send
from hpcsched.errors import RequestError

if TYPE_CHECKING:
    from hpcsched.client.protocol import Flow


class ClusterConnection:
    """The controller that a client asks, and the place that its jobs come from."""

    def __init__(
        self, socket: str, endpoint: GatewayEndpoint | None, *, results: str, calls: Path, python: str
    ) -> None:
        self.socket = socket  # "": the default one
        self.endpoint = endpoint  # of a gateway; then there is no socket
        self._results = results
        self._calls = calls
        self._python = python
        self._home = ""  # on the cluster

    def perform(self, step: Send) -> HttpReply:
        """Send one request, and wait for the answer."""
        if self.endpoint is not None:
            return https.perform(self.endpoint, step)
        return transport.perform(step, self.socket or transport.socket_path())

    def prepare(
        self,
        what: str | os.PathLike[str] | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, object],
        request_id: str,
    ) -> Flow[Prepared]:
        """Return the job of a function, or of a script. Raises RequestError."""
        place = yield from self._place()
        if callable(what):
            return jobs.prepare_call(place, what, [(tuple(args), kwargs)], options, request_id, array=False)
        if kwargs:
            raise RequestError("cannot give keyword arguments to a script: it has words, which follow the script")
        prepared = jobs.prepare_script(place, what, args, options, request_id)
        if prepared.spec.array is not None:
            raise RequestError("cannot submit an array as one job: use submit_array")
        return prepared

    def prepare_array(
        self, script: str | os.PathLike[str], args: Sequence[str], options: Mapping[str, object], request_id: str
    ) -> Flow[Prepared]:
        """Return the array of a script. Raises RequestError."""
        prepared = jobs.prepare_script((yield from self._place()), script, args, options, request_id)
        if prepared.spec.array is None:
            raise RequestError("cannot submit an array without indices: give the option array='0-9'")
        return prepared

    def prepare_map(
        self,
        function: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        options: Mapping[str, object],
        request_id: str,
    ) -> Flow[Prepared]:
        """Return the array that calls a function for each item. Raises RequestError."""
        if not iterables:
            raise RequestError("cannot map a function over nothing: give an iterable")
        arguments: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [
            (items, {}) for items in zip(*iterables, strict=False)
        ]
        return jobs.prepare_call((yield from self._place()), function, arguments, options, request_id, array=True)

    @property
    def loads_pickles(self) -> bool:
        """Return whether results may be pickles: files of this user on this machine."""
        return self.endpoint is None

    def call_of(self, job_id: int, task: int | None) -> Flow[FunctionCall | None]:
        """Return the call that a job makes, None if it runs a script. Raises NotFoundError."""
        reference = str(job_id) if task is None else f"{job_id}_{task}"
        return jobs.found_call(reference, trusts_files=self.loads_pickles)

    def _place(self) -> Flow[SubmitPlace]:
        if self.endpoint is not None:
            if not self._home:
                self._home = yield from jobs.home()
            return SubmitPlace(
                work_dir=self._home,
                environ=dict(os.environ),
                host=os.uname().nodename,
                calls=None,
                python=self._python or "python3",
                is_remote=True,
            )
        try:
            work_dir = os.getcwd()
        except OSError as error:
            raise RequestError(f"cannot submit from this directory: {error.strerror}") from None
        return SubmitPlace(
            work_dir=work_dir,
            environ=jobs.own_environment(),
            host=os.uname().nodename,
            calls=self._calls if self._results == functions.PICKLE else None,
            python=self._python or sys.executable,
        )


def find_connection(
    *,
    url: str,
    token: str,
    ca_file: str | os.PathLike[str],
    socket: str | os.PathLike[str] | None,
    results: str,
    calls: str | os.PathLike[str] | None,
    python: str,
) -> ClusterConnection:
    """Return the connection for a client's arguments. Raises RequestError, ConfigError."""
    endpoint = None
    if url or (socket is None and transport.is_remote()):
        if socket is not None:
            raise RequestError("cannot ask both a socket and an address: give one of them")
        endpoint = https.find_endpoint(url, token, os.fspath(ca_file))
    results = results or (functions.PICKLE if endpoint is None else functions.JSON)
    if results not in (functions.PICKLE, functions.JSON):
        raise RequestError(f"cannot send back results as {results!r}: there are pickle and json")
    if endpoint is not None and results == functions.PICKLE:
        raise RequestError(
            "cannot send back results as pickles from another machine, as they can run code here: use json"
        )
    folder = Path(calls) if calls is not None else functions.default_folder()
    return ClusterConnection(os.fspath(socket or ""), endpoint, results=results, calls=folder.absolute(), python=python)
