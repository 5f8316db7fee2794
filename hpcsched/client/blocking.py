"""`Client`: submit scripts and functions from a program, and wait for them.

`hpcsched.client.aio` is the same for asyncio.

    client = Client()
    job = client.submit(train, 0.1, cpus_per_task=4, time="1:00:00")
    print(job.result())

Every request may be repeated: after a broken connection the client sends it again, and a submission has a request id, so that
it creates one job. Methods raise `hpcsched.errors.HpcschedError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcsched import client as transport
from hpcsched.client import jobs
from hpcsched.client.jobs import (
    ClusterConnection,
    JobInfo,
    JobReference,
    LogFlow,
    NodeInfo,
    Prepared,
    TaskSequence,
    find_connection,
)

if TYPE_CHECKING:
    from hpcsched.client.functions import FunctionCall
    from hpcsched.client.protocol import Flow, Json

T = TypeVar("T")


class Client:
    """A connection to a cluster, for programs that wait. Threads may share it."""

    def __init__(
        self,
        url: str = "",
        *,
        token: str = "",
        ca_file: str | Path = "",
        socket: str | Path | None = None,
        results: str = "",
        calls: str | Path | None = None,
        python: str = "",
    ) -> None:
        """Connect to the gateway at `url`, or without one to the controller's socket.

        `url`: default HPCSCHED_URL. `token` and `ca_file`: default as for the commands. `results`: ``pickle`` or ``json``; see
        docs/python.md. `calls`: the folder of function calls. `python`: the program that runs functions.

        Raises ConfigError, RequestError.
        """
        self._connection: ClusterConnection = find_connection(
            url=url, token=token, ca_file=ca_file, socket=socket, results=results, calls=calls, python=python
        )

    def submit(
        self,
        what: str | os.PathLike[str] | Callable[..., Any],
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        request_id: str = "",
        **options: object,
    ) -> SubmittedJob:
        """Submit a function with its arguments, or a script with its words.

        A script is given by its path, or its text.

        `options` are those of hsub: ``time="1:00:00", cpus_per_task=4, exclusive=True``. The same `request_id` creates the
        same job once. Raises RequestError, UnavailableError.
        """
        prepared = self._run(self._connection.prepare(what, args, kwargs or {}, options, request_id))
        return SubmittedJob(self, self._run(jobs.submit(prepared)), None, prepared.call)

    def map(
        self, function: Callable[..., Any], *iterables: Iterable[Any], request_id: str = "", **options: object
    ) -> JobArray:
        """Submit calls of `function` as one array: one for each item of the iterables, as ``map``.

        ``array="%4"`` runs at most four at a time. Raises RequestError, UnavailableError.
        """
        return self._submit_array(self._connection.prepare_map(function, iterables, options, request_id))

    def submit_array(
        self, script: str | os.PathLike[str], *args: str, request_id: str = "", **options: object
    ) -> JobArray:
        """Submit a script as an array: with the option ``array="0-9"``, here or in the script."""
        return self._submit_array(self._connection.prepare_array(script, args, options, request_id))

    def _submit_array(self, preparing: Flow[Prepared]) -> JobArray:
        prepared = self._run(preparing)
        job_id = self._run(jobs.submit(prepared))
        return JobArray(self, job_id, prepared.tasks, prepared.call)

    def job(self, job_id: int, task: int | None = None) -> SubmittedJob:
        """Return a job that was submitted before, perhaps by another program.

        Raises NotFoundError.
        """
        return SubmittedJob(self, job_id, task, self._run(self._connection.call_of(job_id, task)))

    def jobs(self, **filters: str) -> list[JobInfo]:
        """Return the jobs that the controller remembers.

        ``user="ann", state="RUNNING,PENDING", partition="gpu"``.
        """
        return self._run(jobs.jobs(filters))

    def nodes(self) -> list[NodeInfo]:
        """Return the nodes."""
        return self._run(jobs.nodes())

    def metrics(
        self,
        target: str,
        *series: str,
        from_s: float | None = None,
        to_s: float | None = None,
        step_s: float | None = None,
        of: str = "mean",
    ) -> Json:
        """Return what a node or job used, as `hctl metrics --json`: by default in the last hour.

        Of a counter the values are its growth each second; None is a gap. Raises NotFoundError.
        """
        period = {"from_s": from_s, "to_s": to_s, "step_s": step_s, "of": of}
        return self._run(jobs.metrics(target, series, period))

    def _run(self, flow: Flow[T]) -> T:
        return transport.run(flow, self._connection.perform)


class SubmittedJob(JobReference):
    """A submitted job, or one task of an array."""

    def __init__(self, client: Client, job_id: int, task: int | None, call: FunctionCall | None) -> None:
        super().__init__(job_id, task, call)
        self._client = client

    def __repr__(self) -> str:
        return f"<Job {self.display_id}>"

    def info(self) -> JobInfo:
        """Return the job as it is now. Raises NotFoundError."""
        return self._client._run(jobs.single_info(self.display_id))

    def state(self) -> str:
        """Return the state: PENDING, RUNNING, COMPLETED ..."""
        return self._client._run(jobs.states(self.display_id))[self.display_id]

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self.state() in jobs.ENDED_STATES

    def wait(self, timeout_s: float | None = None) -> JobInfo:
        """Wait until the job has ended, and return how. Raises WaitTimeoutError (a TimeoutError)."""
        self._client._run(jobs.wait(self.display_id, timeout_s))
        return self.info()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the function, and return its result.

        Raises JobFailedError if it raised an exception (the ``__cause__``) or the job ended without a result,
        WaitTimeoutError (a TimeoutError).
        """
        return self._client._run(jobs.wait_for_result(self._call, self.display_id, self.task, timeout_s))

    def logs(self, *, follow: bool = False, stream: str = "out") -> Iterator[str]:
        """Yield the output piece by piece; with `follow` until the job ends.

        `stream`: ``out`` or ``err``.
        """
        log = LogFlow(self.display_id, stream, follow=follow)
        while not log.has_ended:
            if text := self._client._run(log.next()):
                yield text

    def stdout(self) -> str:
        """Return what the job has written to its standard output."""
        return self._client._run(jobs.read_text(self.display_id, "out"))

    def stderr(self) -> str:
        """Return what the job has written to its standard error.

        With the default options one file with its output.
        """
        return self._client._run(jobs.read_text(self.display_id, "err"))

    def cancel(self) -> None:
        """End the job. A job that has ended is left as it is.

        Raises PermissionDeniedError, NotFoundError.
        """
        self._client._run(jobs.cancel([self.display_id]))


class JobArray(TaskSequence[SubmittedJob]):
    """The tasks of an array, in the order of their indices."""

    def __init__(self, client: Client, job_id: int, tasks: Sequence[int], call: FunctionCall | None) -> None:
        super().__init__(job_id, tasks, [SubmittedJob(client, job_id, task, call) for task in tasks], call)
        self._client = client

    def states(self) -> dict[str, str]:
        """Return the state of each task by its id."""
        return self._client._run(jobs.states(str(self.id)))

    def wait(self, timeout_s: float | None = None) -> dict[str, str]:
        """Wait until all tasks have ended; return their states.

        Raises WaitTimeoutError (a TimeoutError).
        """
        return self._client._run(jobs.wait(str(self.id), timeout_s))

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all tasks, and return their results in order.

        Raises as `SubmittedJob.result` for the first without one.
        """
        return self._client._run(jobs.results(self._call, self.id, self._indices, timeout_s))

    def cancel(self) -> None:
        """End all tasks that have not ended. Raises PermissionDeniedError."""
        self._client._run(jobs.cancel([str(self.id)]))
