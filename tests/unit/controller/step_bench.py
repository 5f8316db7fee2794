"""A small world for the step service: two nodes of four cpus, everything it says is collected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Action, Identity, Role, authorize
from hpcsched.errors import RequestError
from hpcsched.model.ids import JobId, LaunchToken, NodeName
from hpcsched.model.job import ExitStatus, Job, JobState
from hpcsched.model.node import Share
from hpcsched.model.spec import JobSpec
from hpcsched.state.transaction import StepRecord
from hpcsched.steps.service import HEAD, Origin, StepPorts, StepService

N1, N2 = NodeName("n1"), NodeName("n2")
ANN, BOB, ADMIN = 1001, 1002, 1009
HRUN: Origin = (N1, 5)
SECOND: Origin = (N1, 6)
THIRD: Origin = (N1, 7)


def a_job(job_id: int = 12, *, cpus: tuple[int, ...] = (4, 4), script: str = "#!/bin/sh\n", **changes: Any) -> Job:
    shares = tuple(
        Share(node=NodeName(f"n{i}"), cpus=n, mem_mib=1000, gpus=(0, 1), tasks=1) for i, n in enumerate(cpus, start=1)
    )
    spec = JobSpec(name="train", script=script, work_dir="/home/ann")
    job = Job(id=JobId(job_id), spec_id=1, spec=spec, uid=ANN, user="ann", submitted_at_s=1.0, state=JobState.RUNNING)
    return replace(job, shares=shares, **{"held_nodes": tuple(share.node for share in shares)} | changes)


class StepBench:
    """A service, and all that it said."""

    def __init__(self, *jobs: Job) -> None:
        self.jobs = {job.id: job for job in jobs or (a_job(),)}
        self.sent: list[tuple[NodeName, Any, bytes]] = []
        self.replies: dict[Origin, list[Any]] = {}
        self.released: list[tuple[int, ExitStatus]] = []
        self.resized: list[tuple[int, int, int]] = []
        self.rows: dict[tuple[int, int, str], StepRecord] = {}
        self.order: list[str] = []  # "row", "send", "reply": what came before what
        self.tokens = 0
        self.refuse_allocation = ""
        self.seq = 0
        self.restart()

    def restart(self) -> None:
        """A new service, as after a restart of the controller: only the rows are left."""
        self.service = StepService(
            StepPorts(
                resize=lambda job, count, uid: self.resized.append((job.id, count, uid)),
                job=self.jobs.get,
                send=self._send,
                reply=self._reply,
                allocate=self._allocate,
                release=lambda job_id, exit: self.released.append((job_id, exit)),
                record=self._record,
                new_token=self._new_token,
                propagate=frozenset(),
                environment=lambda job, plan: {"SLURM_STEP_ID": str(plan.number), "WINS": "scheduler"},
                account=lambda job, node: job.user,
                hosts=lambda job: [(share.node, share.cpus) for share in job.shares],
                same_machine=lambda job: False,
                last_step=lambda job_id, attempt: max((int(r.step) for r in self.rows.values()), default=-1),
                authorize=self._authorize,
                epoch=lambda: 7,
                now_s=lambda: 100.0,
                grace_s=30.0,
                recorded=lambda job_id, attempt: [
                    row for row in self.rows.values() if (row.job_id, row.attempt) == (job_id, attempt)
                ],
            )
        )

    def _authorize(self, uid: int, job: Job) -> None:
        identity = Identity(uid=uid, user=f"uid {uid}", role=Role.ADMIN if uid in (0, ADMIN) else Role.USER)
        authorize(identity, Action.RUN_STEP, job, f"start a step in job {job.id}")

    def _send(self, node: NodeName, message: Any, blob: bytes) -> None:
        self.order.append("send")
        self.sent.append((node, message, blob))

    def _reply(self, origin: Origin, message: Any, blob: bytes) -> None:
        self.order.append("reply")
        self.replies.setdefault(origin, []).append(message)

    def _record(self, row: StepRecord) -> None:
        self.order.append("row")
        self.rows[(row.job_id, row.attempt, row.step)] = row

    def _allocate(self, request: protocol.StepRequest, uid: int) -> JobId:
        if self.refuse_allocation:
            raise RequestError(self.refuse_allocation)
        return JobId(20)

    def _new_token(self, job: Job, step: str, node: NodeName) -> str:
        self.tokens += 1
        nonce = f"{self.tokens:032x}"
        return str(
            LaunchToken(incarnation="0a" * 8, job_id=job.id, attempt=job.attempt, step=step, node=node, nonce=nonce)
        )

    # what happens in it

    def says(self, origin: Origin, message: Any, *, uid: int = ANN, job_id: int = 12, blob: bytes = b"") -> None:
        said = protocol.FromStream(
            stream=origin[1],
            uid=uid,
            job_id=0 if origin[0] == HEAD else job_id,
            attempt=0,
            message=protocol.to_json(message),
        )
        self.service.on_from_stream(origin[0], said, blob)

    def asks(
        self, *, origin: Origin = HRUN, uid: int = ANN, job_id: int = 12, argv: str = "prog", **options: Any
    ) -> Any:
        """Ask for a step, and return the last reply."""
        request = a_request(argv=argv, job_id=job_id, **options)
        self.says(origin, request, uid=uid, job_id=job_id)
        return self.replies[origin][-1]

    def launches(self) -> list[tuple[NodeName, protocol.Launch]]:
        return [(node, message) for node, message, _ in self.sent if isinstance(message, protocol.Launch)]

    def said_to(self, node: NodeName, kind: type) -> list[Any]:
        return [message for to, message, _ in self.sent if to == node and isinstance(message, kind)]

    def report(self, token: str, status: str = protocol.ENDED, **facts: Any) -> protocol.Report:
        self.seq += 1
        return protocol.Report(seq=self.seq, token=token, status=status, at_s=50.0, **facts)

    def ends(self, launch: protocol.Launch, *codes: int, signals: tuple[int, ...] = (), **facts: Any) -> None:
        report = self.report(launch.token, codes=list(codes), signals=list(signals or [0] * len(codes)), **facts)
        self.service.on_report(LaunchToken.parse(launch.token).node, report)

    def ended(self, origin: Origin = HRUN) -> protocol.StepEnded:
        (message,) = [message for message in self.replies[origin] if isinstance(message, protocol.StepEnded)]
        return message

    def has_ended(self, origin: Origin = HRUN) -> bool:
        return any(isinstance(message, protocol.StepEnded) for message in self.replies.get(origin, []))


def a_request(*, argv: str = "prog", job_id: int = 12, env: dict[str, str] | None = None, **options: Any) -> Any:
    return protocol.StepRequest(
        version=protocol.VERSION,
        job_id=job_id,
        options={name.replace("_", "-"): value for name, value in options.items()},
        argv=argv.split(),
        work_dir="/work",
        env=env or {"WINS": "user", "FOO": "1"},
    )


def inventory(*reports: protocol.Report) -> list[dict[str, Any]]:
    fields = [protocol.to_json(report) for report in reports]
    return [{name: value for name, value in each.items() if name != "type"} for each in fields]


def gos(bench: StepBench) -> list[NodeName]:
    return sorted(to for to, message, _ in bench.sent if isinstance(message, protocol.Go))
