"""Those who ask: they submit and cancel, wait for the answer, and ask again if none comes. And step commands on nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcnode.wire import protocol
from hpcsched.auth.authorize import Identity, Role
from hpcsched.controller import preemption
from hpcsched.controller.requests import jobs, submission, update
from hpcsched.errors import HpcschedError, RequestError, UnavailableError
from hpcsched.model.ids import JobId
from hpcsched.model.job import Hold, JobState
from hpcsched.model.spec import JobSpec
from simulation.machine import Machine
from simulation.shepherds import behaviour_of

if TYPE_CHECKING:
    from hpcsched.state.transaction import Transaction
    from simulation.agent import SimAgent
    from simulation.stage import Simulation

ANN = Identity(uid=1000, user="ann", role=Role.USER)
ROOT = Identity(uid=0, user="root", role=Role.ADMIN)
PATIENCE_S = 8.0
MAX_TRIES = 200

Work = Callable[[Any, Any], Any]  # transaction, store -> answer
Told = Callable[[Any], None]


class People:
    """Everybody who uses the cluster."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.answers_lost = 0.0  # how often the connection to the controller breaks before the answer
        self.doubled = 0.0  # how often a request arrives twice
        self.gives_up = False
        self.waiting = 0  # requests that are not answered yet
        self.jobs: dict[str, list[JobId]] = {}  # by request id: what the client was told
        self._submitting: set[str] = set()
        self._streams = 0
        self._heard: dict[tuple[str, int, int], int] = {}  # (incarnation, job, attempt) -> generation of its allocation

    # ----- requests

    def submit(self, name: str, specs: list[JobSpec]) -> None:
        """Submit the jobs under a request id."""

        def work(tx: Any, store: Any) -> Any:
            return submission.submit(tx, ANN, name, specs, store.request_jobs)

        def told(answer: list[dict[str, int]]) -> None:
            ids = [JobId(item["job_id"]) for item in answer]
            self.sim.truth.submit_acknowledged(name, ids)
            self.jobs.setdefault(name, ids)

        self._submitting.add(name)
        self._ask(f"submit {name}", work, told)

    def cancel(self, name: str, told: Told | None = None) -> None:
        """Cancel what a request made."""
        self._on_jobs("cancel", name, lambda tx, refs: jobs.cancel(tx, ANN, refs, {}))

    def requeue(self, name: str) -> None:
        self._on_jobs("requeue", name, lambda tx, refs: jobs.requeue(tx, ANN, refs))

    def hold(self, name: str) -> None:
        self._on_jobs("hold", name, lambda tx, refs: jobs.hold(tx, ANN, refs))

    def suspend(self, name: str) -> None:
        self._on_jobs("suspend", name, lambda tx, refs: jobs.suspend(tx, ROOT, refs))

    def go_on(self, name: str) -> None:
        self._on_jobs("resume", name, lambda tx, refs: jobs.resume(tx, ROOT, refs))

    def resize(self, name: str, count: int) -> None:
        """Have the jobs go on with so many nodes."""
        change = {"num_nodes": str(count)}
        self._on_jobs("update", name, lambda tx, refs: update.update(tx, ANN, refs, change))

    def release(self, name: str) -> None:
        self._on_jobs("release", name, lambda tx, refs: jobs.release(tx, ANN, refs))

    def signal(self, name: str, signum: int) -> None:
        """Send a signal to the jobs' processes."""
        self._on_jobs("signal", name, lambda tx, refs: jobs.signal(tx, ANN, refs, {}, signum, False, False))

    def drain(self, node: str) -> None:
        self._ask(f"drain {node}", lambda tx, _: jobs.drain(tx, ROOT, node, "test", ""), lambda _: None)

    def resume(self, node: str) -> None:
        self._ask(f"resume {node}", lambda tx, _: jobs.resume_nodes(tx, ROOT, node, ""), lambda _: None)

    def fence(self, node: str, heard: Callable[[], None]) -> None:
        """Say that the node runs nothing: it has to be off, until `heard` is called."""
        self._ask(f"fence {node}", lambda tx, _: jobs.fence(tx, ROOT, node, ""), lambda _: None, heard)

    def ask_until_it_is_done(self, what: str, work: Work, heard: Callable[[], None]) -> None:
        """Ask, again and again while it is refused; `heard` is called when it is done."""
        self._ask(what, work, lambda _: None, heard)

    def ask_once(self, what: str, work: Work) -> None:
        """Ask; a refusal is an answer."""
        self._ask(what, work, lambda _: None)

    def _on_jobs(self, what: str, name: str, do: Callable[[Any, list[str]], jobs.Outcome]) -> None:
        if name not in self.jobs:
            if name in self._submitting:
                self.sim.agenda.later(1.0, None, self._on_jobs, what, name, do)  # its numbers are not known yet
            return
        refs = [str(job_id) for job_id in self.jobs[name]]

        def told(outcome: jobs.Outcome) -> None:
            if what == "cancel":
                self.sim.truth.cancel_acknowledged(outcome.jobs)
            if outcome.signals:
                head = self.sim.head
                if head is not None:
                    head.controller.send_signals(outcome.signals)

        self._ask(f"{what} {name}", lambda tx, _: do(tx, refs), told)

    def release_all(self) -> None:
        """Release every held job, and give up whatever would keep jobs or nodes from their work."""
        self.gives_up = True
        for job in self.sim.truth.rows.values():
            if job.hold is Hold.USER and job.state is JobState.PENDING:
                ref = str(job.id)
                self._ask(f"release {ref}", lambda tx, _, ref=ref: jobs.release(tx, ANN, [ref]), lambda _: None)
            elif job.state is JobState.SUSPENDED and job.suspended_for is None:
                ref = str(job.id)
                self._ask(f"resume {ref}", lambda tx, _, ref=ref: jobs.resume(tx, ROOT, [ref]), lambda _: None)

    def _ask(self, what: str, work: Work, told: Told, heard: Callable[[], None] = lambda: None) -> None:
        self.waiting += 1
        _Request(self, what, work, told, heard).send()

    # ----- step commands

    def start_step(self, machine: Machine, launch: protocol.Launch, nodes: int = 0) -> None:
        """Have the script that runs as `launch` run a step on so many nodes, or on all that it began with."""
        agent = machine.agent
        if agent is None:
            return
        self._streams += 1
        StepCommand(self.sim, agent, self._streams, launch, nodes or len(launch.hosts)).send()

    def hear_allocation(self, machine: Machine, told: protocol.Allocation) -> None:
        """A script that runs there does as it is asked; on nodes that it is given it runs a step, if it is one that does."""
        key = (told.incarnation, told.job_id, told.attempt)
        scripts = (one.launch for one in machine.programs.values() if one.is_main and one.launch.step == protocol.BATCH)
        script = next((one for one in scripts if (one.job_id, one.attempt) == key[1:]), None)
        if script is None or told.generation <= self._heard.get(key, 0):
            return
        self._heard[key] = told.generation
        if told.wanted:
            self._ask(f"answer {told.job_id}", lambda tx, _: _give_back(tx, told), lambda _: None)
        elif behaviour_of(script).step and len(told.nodes) > 1:
            self.start_step(machine, script, len(told.nodes))


def _give_back(tx: Transaction, told: protocol.Allocation) -> None:
    """Answer as ``hrun --resize`` does in a job that was asked to make do with fewer nodes."""
    job = tx.cluster.jobs.get(JobId(told.job_id))
    if job is not None:
        preemption.shrink(tx, job, len(told.wanted), ANN.uid)


class _Request:
    """One request, until it is answered."""

    def __init__(self, people: People, what: str, work: Work, told: Told, heard: Callable[[], None]) -> None:
        self._people, self._what, self._work, self._told, self._heard = people, what, work, told, heard
        self._sim = people.sim
        self._over = False
        self._tries = 0

    def send(self) -> None:
        """Ask the controller, if one is there; look again after a while."""
        if self._over:
            return
        if self._people.gives_up and self._what.startswith(("drain", "hold", "suspend")):
            self._over = True
            self._people.waiting -= 1
            return
        self._tries += 1
        sim, head = self._sim, self._sim.head
        if self._tries > MAX_TRIES:
            sim.truth.broken("liveness", f"nobody answers to {self._what}")
        if head is not None and head.serving:
            store = head.controller.store
            doubled = sim.flip(self._people.doubled)
            sim.faults["request doubled"] += doubled
            for _ in range(2 if doubled else 1):
                head.controller.ask(lambda tx: self._work(tx, store), self._answered)
        sim.agenda.later(PATIENCE_S, None, self.send)

    def _answered(self, result: Any) -> None:
        """The controller answers: from here on its word counts, whether it arrives or not."""
        sim = self._sim
        sim.points.reached(f"before the answer to {self._what.split(' ')[0]}")
        if isinstance(result, UnavailableError):
            return
        if isinstance(result, RequestError) and self._what.startswith("fence"):
            return  # the controller has not noticed yet that the node is off: the admin says it again
        if isinstance(result, HpcschedError):
            sim.tell(f"{self._what}: {result}")
        else:
            self._told(result)
        if sim.flip(self._people.answers_lost):
            sim.faults["answer lost"] += 1
            sim.tell(f"the answer to {self._what} is lost")
        elif not self._over:
            self._over = True
            self._people.waiting -= 1
            sim.tell(f"{self._what} is answered")
            self._heard()
        sim.points.reached(f"after the answer to {self._what.split(' ')[0]}")


class StepCommand:
    """An hrun in a job's script: asks for a step, and ends with its script."""

    def __init__(self, sim: Simulation, agent: SimAgent, stream: int, launch: protocol.Launch, nodes: int) -> None:
        self._sim, self._agent, self._stream, self._launch, self._nodes = sim, agent, stream, launch, nodes

    def send(self) -> None:
        launch = self._launch
        request = protocol.StepRequest(
            version=protocol.VERSION,
            job_id=launch.job_id,
            options={"nodes": str(self._nodes), "ntasks": str(self._nodes), "output": "/tmp/out"},
            argv=["program", "3.0", "0"],
            work_dir="/tmp",
            env={},
        )
        self._agent.clients[self._stream] = self._heard
        self._agent.say(
            protocol.FromStream(
                stream=self._stream,
                uid=ANN.uid,
                job_id=launch.job_id,
                attempt=launch.attempt,
                message=protocol.to_json(request),
            )
        )

    def _heard(self, message: dict[str, Any]) -> None:
        if message["type"] == "StepEnded":
            self._agent.clients.pop(self._stream, None)
            self._agent.say(protocol.CloseStream(self._stream))
