"""`AsyncClient`: `hpcsched.client.blocking` for asyncio.

A thread is used only to wait where too many clients ask the controller at once.

client = AsyncClient()
job = await client.submit(train, 0.1, cpus_per_task=4)
print(await job.result())
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcsched import client as transport
from hpcsched.client import https, jobs
from hpcsched.client.https import GatewayEndpoint
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
from hpcsched.client.protocol import (
    READ_BYTES,
    BrokenConnectionError,
    HttpReply,
    Json,
    Pause,
    ReplyReader,
    Send,
    late,
    lost,
    request_bytes,
)
from hpcsched.errors import HpcschedError

if TYPE_CHECKING:
    from hpcsched.client.functions import FunctionCall
    from hpcsched.client.protocol import Flow

T = TypeVar("T")


class AsyncClient:
    """A connection to a cluster, for programs with an event loop."""

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
        """Connect as `Client`. Raises ConfigError, RequestError."""
        self._connection: ClusterConnection = find_connection(
            url=url, token=token, ca_file=ca_file, socket=socket, results=results, calls=calls, python=python
        )

    async def submit(
        self,
        what: str | os.PathLike[str] | Callable[..., Any],
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        request_id: str = "",
        **options: object,
    ) -> AsyncJob:
        """Submit a function with its arguments, or a script, as `Client.submit`."""
        prepared = await self._run(self._connection.prepare(what, args, kwargs or {}, options, request_id))
        return AsyncJob(self, await self._run(jobs.submit(prepared)), None, prepared.call)

    async def map(
        self, function: Callable[..., Any], *iterables: Iterable[Any], request_id: str = "", **options: object
    ) -> AsyncJobArray:
        """Submit calls of `function` as one array, as `Client.map`."""
        return await self._submit_array(self._connection.prepare_map(function, iterables, options, request_id))

    async def submit_array(
        self, script: str | os.PathLike[str], *args: str, request_id: str = "", **options: object
    ) -> AsyncJobArray:
        """Submit a script as an array, as `Client.submit_array`."""
        return await self._submit_array(self._connection.prepare_array(script, args, options, request_id))

    async def _submit_array(self, preparing: Flow[Prepared]) -> AsyncJobArray:
        prepared = await self._run(preparing)
        return AsyncJobArray(self, await self._run(jobs.submit(prepared)), prepared.tasks, prepared.call)

    async def job(self, job_id: int, task: int | None = None) -> AsyncJob:
        """Return a job that was submitted before, as `Client.job`."""
        return AsyncJob(self, job_id, task, await self._run(self._connection.call_of(job_id, task)))

    async def jobs(self, **filters: str) -> list[JobInfo]:
        """Return the jobs that the controller remembers, as `Client.jobs`."""
        return await self._run(jobs.jobs(filters))

    async def nodes(self) -> list[NodeInfo]:
        """Return the nodes."""
        return await self._run(jobs.nodes())

    async def metrics(
        self,
        target: str,
        *series: str,
        from_s: float | None = None,
        to_s: float | None = None,
        step_s: float | None = None,
        of: str = "mean",
    ) -> Json:
        """Return what a node or job used, as `Client.metrics`."""
        period = {"from_s": from_s, "to_s": to_s, "step_s": step_s, "of": of}
        return await self._run(jobs.metrics(target, series, period))

    async def _run(self, flow: Flow[T]) -> T:
        return await run(flow, lambda step: perform(step, self._connection))


class AsyncJob(JobReference):
    """A submitted job, or one task of an array. ``await job`` is ``await job.result()``."""

    def __init__(self, client: AsyncClient, job_id: int, task: int | None, call: FunctionCall | None) -> None:
        super().__init__(job_id, task, call)
        self._client = client

    def __repr__(self) -> str:
        return f"<AsyncJob {self.display_id}>"

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result().__await__()

    async def info(self) -> JobInfo:
        """Return the job as it is now. Raises NotFoundError."""
        return await self._client._run(jobs.single_info(self.display_id))

    async def state(self) -> str:
        """Return the state: PENDING, RUNNING, COMPLETED ..."""
        return (await self._client._run(jobs.states(self.display_id)))[self.display_id]

    async def done(self) -> bool:
        """Return whether the job has ended."""
        return await self.state() in jobs.ENDED_STATES

    async def wait(self, timeout_s: float | None = None) -> JobInfo:
        """Wait until the job has ended, as `SubmittedJob.wait`."""
        await self._client._run(jobs.wait(self.display_id, timeout_s))
        return await self.info()

    async def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the function, and return its result, as `SubmittedJob.result`."""
        return await self._client._run(jobs.wait_for_result(self._call, self.display_id, self.task, timeout_s))

    async def logs(self, *, follow: bool = False, stream: str = "out") -> AsyncIterator[str]:
        """Yield the output piece by piece, as `SubmittedJob.logs`."""
        log = LogFlow(self.display_id, stream, follow=follow)
        while not log.has_ended:
            if text := await self._client._run(log.next()):
                yield text

    async def stdout(self) -> str:
        """Return what the job has written to its standard output."""
        return await self._client._run(jobs.read_text(self.display_id, "out"))

    async def stderr(self) -> str:
        """Return what the job has written to its standard error, as `SubmittedJob.stderr`."""
        return await self._client._run(jobs.read_text(self.display_id, "err"))

    async def cancel(self) -> None:
        """End the job, as `SubmittedJob.cancel`."""
        await self._client._run(jobs.cancel([self.display_id]))


class AsyncJobArray(TaskSequence[AsyncJob]):
    """The tasks of an array, in the order of their indices."""

    def __init__(self, client: AsyncClient, job_id: int, tasks: Sequence[int], call: FunctionCall | None) -> None:
        super().__init__(job_id, tasks, [AsyncJob(client, job_id, task, call) for task in tasks], call)
        self._client = client

    async def states(self) -> dict[str, str]:
        """Return the state of each task by its id."""
        return await self._client._run(jobs.states(str(self.id)))

    async def wait(self, timeout_s: float | None = None) -> dict[str, str]:
        """Wait until all tasks have ended, as `JobArray.wait`."""
        return await self._client._run(jobs.wait(str(self.id), timeout_s))

    async def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all tasks, and return their results in order, as `JobArray.results`."""
        return await self._client._run(jobs.results(self._call, self.id, self._indices, timeout_s))

    async def cancel(self) -> None:
        """End all tasks that have not ended."""
        await self._client._run(jobs.cancel([str(self.id)]))


# ----- the steps of the protocol, without a thread


async def run(flow: Flow[T], send: Callable[[Send], Awaitable[HttpReply]]) -> T:
    """Perform the steps of a flow, one after the other, and return its result."""
    try:
        step = next(flow)
        while True:
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                step = flow.send(None)
                continue
            try:
                reply = await send(step)
            except HpcschedError as error:
                step = flow.throw(error)
            else:
                step = flow.send(reply)
    except StopIteration as done:
        result: T = done.value
        return result


async def perform(step: Send, connection: ClusterConnection) -> HttpReply:
    """Send one request, and return the answer."""
    try:
        async with asyncio.timeout(step.timeout_s):
            if connection.endpoint is not None:
                return await _by_gateway(step, connection.endpoint)
            sock = await _connected(connection.socket or transport.socket_path(), step.timeout_s)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
            return await _exchanged(reader, writer, request_bytes(step.method, step.path, step.body))
    except TimeoutError:
        raise late(step.timeout_s) from None


async def _by_gateway(step: Send, endpoint: GatewayEndpoint) -> HttpReply:
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            https.check_peer(endpoint, writer.get_extra_info("peername"))
            if endpoint.tls is not None:
                await writer.start_tls(endpoint.tls, server_hostname=endpoint.host)
        except BaseException:
            writer.close()
            raise
    except OSError as error:
        raise https.unreachable(endpoint, error) from None
    try:
        reply = await _exchanged(reader, writer, https.request_of(endpoint, step))
    except BrokenConnectionError as error:
        raise https.broken(endpoint, error) from None
    return https.checked_reply(endpoint, reply)


async def _connected(path: str, timeout_s: float) -> socket.socket:
    """Return a socket connected to the controller. Raises UnavailableError."""
    try:
        sock = await connected(path, timeout_s)
        try:
            transport.check_server(sock, path)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise transport.unreachable(error, path) from None
    return sock


async def connected(path: str, timeout_s: float) -> socket.socket:
    """Return a socket connected to `path`. While its queue is full, a thread waits.

    asyncio takes the EAGAIN of a unix socket for a connection that is under way.

    Raises OSError: BlockingIOError after `timeout_s`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        try:
            sock.connect(path)
        except BlockingIOError:
            await asyncio.to_thread(transport.reach, sock, path, timeout_s)
            sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


async def _exchanged(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> HttpReply:
    parser = ReplyReader()
    writer.write(request)
    try:
        while (reply := parser.feed(await reader.read(READ_BYTES))) is None:
            pass
        return reply
    except OSError as error:
        raise lost(error) from None
    finally:
        writer.close()
