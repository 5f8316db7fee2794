"""The demo's story: a training on two of three machines, and two failures.

The controller is killed, and a node is lost.

Read `Story.run` from top to bottom. Each act does something, then waits for what must follow; if it does not follow in
time, the story ends with an error that says what is missing. Knows neither terminals (`show`) nor processes (`keeper`).
The training script has the shape of etc/examples/train_chargpt.sh.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpcsched.demo.picture import Scene, StoryLine
from hpcsched.errors import UnavailableError
from hpcsched.listing.jobs import ACTIVE_STATES
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.sched.sentences import plural
from hpcsched.tui.reading import ClusterScreen
from hpcsched.tui.training import TrainingRun

TRAIN_NAME = "chargpt"
OUT_DIR = "chargpt-out"
FRAME_S = 0.25
STALL_S = 60.0  # the longest time between two steps
START_S = 60.0  # from submission to the start of the job
FIRST_STEP_S = 120.0  # two ranks import torch on a busy machine
DOWN_S = 30.0
RECONNECT_S = 60.0
AFTER_S = 30.0  # for the small jobs, after the training
BAD_ENDS = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")

T = TypeVar("T")

# ----- the jobs


TRAIN_SCRIPT = """\
#!/bin/bash
#HSUB --job-name={name}
#HSUB --nodes=2 --ntasks-per-node=1 --cpus-per-task=2
#HSUB --time=00:30:00
#HSUB --requeue --open-mode=append
#HSUB --output={name}-%j.out

mpirun {python} -P -m hpctrain.examples.chargpt --out {out} \\
    {options}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallJob:
    """A job beside the training, so that the queue is busy.

    `file` is its script, `options` are those of hsub.
    """

    file: str
    script: str
    what: str
    options: tuple[str, ...] = ()


def training_script(python: str, options: Sequence[str]) -> str:
    """Return the training's script.

    `python` is an interpreter that has the training's packages.
    """
    return TRAIN_SCRIPT.format(name=TRAIN_NAME, python=shlex.quote(python), out=OUT_DIR, options=" ".join(options))


def training_options(seconds: float, checkpoint_every: int) -> list[str]:
    """Return the options of a training of about `seconds`, with its checkpoints."""
    return [
        f"--target-seconds {seconds:g}",
        f"--checkpoint-every {checkpoint_every}",
        "--base-every 5",
        "--eval-every 25",
    ]


def small_jobs(train_id: int, *, tasks: int) -> list[SmallJob]:
    """Return an array for the third node, and jobs that wait for all nodes and the training."""
    return [
        SmallJob(
            file="sweep.sh",
            script=f"#!/bin/sh\n#HSUB --job-name=sweep --array=1-{tasks}%2 --nodelist=n3 --time=1 --output=/dev/null\n"
            "sleep $((3 + HPCSCHED_ARRAY_TASK_ID % 4))\n",
            what=f"an array of {tasks} short tasks, two at a time, on n3",
        ),
        SmallJob(
            file="census.sh",
            script="#!/bin/sh\n#HSUB --job-name=census --nodes=3 --time=1 --nice --output=census.out\n"
            "hrun --label hostname | sort\n",
            what="waits for all three nodes",
        ),
        SmallJob(
            file="report.sh",
            script="#!/bin/sh\n#HSUB --job-name=report --time=1 --output=report.out\n"
            f"grep weights {TRAIN_NAME}-{train_id}.out\n",
            what="waits for the end of the training",
            options=(f"--dependency=afterok:{train_id}",),
        ),
    ]


# ----- what the story needs


class Stage(Protocol):
    """Where the story is shown."""

    def tell(self, line: StoryLine) -> None:
        """Show one line of the story."""

    def show(self, lines: Sequence[str]) -> None:
        """Show lines of text as they are."""

    def frame(self, scene: Scene, elapsed_s: float) -> None:
        """Show the cluster as it is now."""


class ScreenReader(Protocol):
    """How the story sees the cluster."""

    def look(self, chosen: str | int | None) -> ClusterScreen:
        """Return the cluster as it is now, with one job."""


class Keeper(Protocol):
    """What does things to the machines."""

    def ask(self, action: str, *arguments: str) -> dict[str, Any]:
        """Do `action` and return its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryPlan:
    """What happens when. Points of the training are fractions, 0 to 1."""

    python: str
    training_options: tuple[str, ...]
    small_tasks: int
    checkpoint_every: int
    controller_dies_at: float = 0.2
    controller_away_s: float = 4.0
    node_dies_at: float = 0.5
    limbo_s: float = 6.0  # time to read why the job is in limbo
    read_s: float = 0.0  # time to read the job script


@dataclass(slots=True)
class StoryResult:
    """The figures of the closing table."""

    server: str = ""
    cluster_up_s: float = 0.0
    job_id: int = 0
    start_s: float = 0.0  # from submission to RUNNING
    controller_away_s: float = 0.0
    steps_without_controller: int = 0
    lost_node: str = ""
    detect_s: float = 0.0  # from the power cut to DOWN
    down_for_s: float = 0.0  # from the power cut to the power
    requeue_s: float = 0.0  # from the power to the new attempt
    resume_s: float = 0.0  # from the power to the first step
    resumed_from: int = 0
    lost_at: int = 0  # the last step before the power cut
    attempts: int = 0
    run: TrainingRun = field(default_factory=TrainingRun)
    total_s: float = 0.0


class Story:
    """One run of the story. Each `_act` method is an act."""

    def __init__(
        self, cluster: LocalCluster, keeper: Keeper, reader: ScreenReader, stage: Stage, plan: StoryPlan
    ) -> None:
        self._cluster, self._keeper, self._reader, self._stage, self._plan = cluster, keeper, reader, stage, plan
        self.result = StoryResult()
        self._began_s = time.monotonic()
        self._lines: list[StoryLine] = []
        self._act = ""
        self._power_on_s = 0.0

    def run(self) -> StoryResult:
        """Play all acts. Raises UnavailableError if something does not happen in time."""
        self._start_cluster()
        self._submit()
        self._wait_for_checkpoint()
        self._kill_controller()
        self._cut_power()
        self._resume()
        self._finish()
        self.result.total_s = self.elapsed_s()
        return self.result

    # ----- acts

    def _start_cluster(self) -> None:
        self._begin("three machines")
        began_s = time.monotonic()
        self.result.server = self._keeper.ask("machines")["server"]
        server = "OpenSSH's sshd" if self.result.server == "sshd" else "the embedded SSH server"
        self.say("note", f"n1, n2, n3 answer on loopback, behind {server} ({time.monotonic() - began_s:.1f} s)")
        self._keeper.ask("up")
        self._keeper.ask("connect")
        self.result.cluster_up_s = time.monotonic() - began_s
        self.say(
            "good", f"hpcschedd runs, and its agent answers on every node ({self.result.cluster_up_s:.1f} s in all)"
        )
        for node in self._cluster.api("GET", "/v1/nodes?probe=1")["nodes"]:
            self.say("note", f"{node['name']}: {node_facts(node)}")

    def _submit(self) -> None:
        self._begin("a training job on two of the three nodes")
        script = training_script(self._plan.python, self._plan.training_options)
        self._stage.show(script.rstrip().splitlines())
        self.result.job_id = job_id = self._hsub(SmallJob(file=f"{TRAIN_NAME}.sh", script=script, what="the training"))
        for small_job in small_jobs(job_id, tasks=self._plan.small_tasks):
            self._hsub(small_job)
        self._pause(self._plan.read_s)
        job = self._job(self.until(self._runs, "the training job to start", START_S))
        self.result.start_s = job["started_at_s"] - job["submitted_at_s"]
        self.say("good", f"job {job_id} runs on {job['node_list']}: mpirun, one rank on each node")

    def _hsub(self, job: SmallJob) -> int:
        """Submit a job and return its number."""
        (self._cluster.share / job.file).write_text(job.script)
        words = ("hsub", *job.options, job.file)
        number = int(self._cluster.run(*words).stdout.split()[-1])
        self.say("note", f"$ {' '.join(words)}   ->  job {number}: {job.what}")
        return number

    def _wait_for_checkpoint(self) -> None:
        self._begin("training on two nodes")
        self.until(lambda screen: bool(screen.run.points), "the first training step", FIRST_STEP_S)
        self.say("note", "the ranks are connected: the loss is going down")
        made = self.until(lambda screen: bool(screen.run.checkpoints), "the first checkpoint").run.checkpoints[0]
        self.say("good", f"first checkpoint on the share: step {made.step}, {made.size_bytes / 1e6:.1f} MB")

    def _kill_controller(self) -> None:
        self.until(lambda screen: screen.run.done >= self._plan.controller_dies_at, "more steps")
        self._begin("the controller dies, the job does not notice")
        before, died_s = self.look().run.step, time.monotonic()
        pid = self.meanwhile(lambda: self._keeper.ask("kill_controller"))["pid"]
        self.say("bad", f"hpcschedd (pid {pid}) is killed with SIGKILL")
        self.until(
            lambda screen: time.monotonic() > died_s + self._plan.controller_away_s and screen.run.step > before,
            "steps without a controller",
        )
        self.meanwhile(lambda: self._keeper.ask("up"))
        screen = self.until(self._is_well, "the controller to find its nodes and job again", RECONNECT_S)
        self.result.controller_away_s = away_s = time.monotonic() - died_s
        self.result.steps_without_controller = steps = screen.run.step - before
        job_id = self.result.job_id
        self.say("good", f"back after {away_s:.1f} s, it finds job {job_id} running: {steps} steps done meanwhile")

    def _cut_power(self) -> None:
        node = self._job(self.until(self._is_time_to_lose, "half of the training and two checkpoints"))["nodes"][0]
        self._begin(f"{node} loses power")
        off_s = time.monotonic()
        count = self.meanwhile(lambda: self._keeper.ask("power_off", node))["killed"]
        self.result.lost_node, self.result.lost_at = node, self.look().run.step
        self.say("bad", f"{count} processes on {node} are gone, the job's script and rank 0 among them")
        self.until(lambda screen: self._is_down(screen, node), f"{node} to be DOWN", DOWN_S, job_may_end=True)
        self.result.detect_s = time.monotonic() - off_s
        self.say("bad", f"{node} is DOWN after {self.result.detect_s:.1f} s, job {self.result.job_id} in limbo")
        self.say("note", "it may still run behind a cut cable, so it is not started elsewhere: nothing runs twice")
        self._pause(self._plan.limbo_s, watch=True)
        self._power_on_s = time.monotonic()
        self.meanwhile(lambda: self._keeper.ask("power_on", node))
        self.result.down_for_s = time.monotonic() - off_s
        self.say("note", f"{node} boots: its new boot id proves that nothing of the old attempt runs")

    def _resume(self) -> None:
        result = self.result
        self._begin("requeued, and back to the last checkpoint")
        self.until(lambda screen: self._job(screen)["attempt"] >= 1, "the job to be requeued", RECONNECT_S)
        self.say("good", f"job {result.job_id} is requeued automatically, as attempt 1")
        screen = self.until(self._has_run, "the new attempt to start", START_S)
        result.requeue_s = time.monotonic() - self._power_on_s
        self.say("note", f"attempt 1 runs on {self._job(screen)['node_list']}")
        screen = self.until(
            lambda screen: screen.run.attempt >= 1 or self._job(screen)["state"] == "COMPLETED",
            "the new attempt's first step",
            FIRST_STEP_S,
        )
        result.resume_s = time.monotonic() - self._power_on_s
        result.lost_at = max(point.step for point in screen.run.points if point.attempt == 0)
        if screen.run.attempt < 1:  # a slow machine: the lost node had not yet reported the last step
            result.resumed_from = result.lost_at
            self.say("good", f"all {result.lost_at} steps were done before the loss: none is left to do")
            return
        _, result.resumed_from = screen.run.resumes[-1]
        lost = len(screen.run.lost)
        self.say("good", f"resumed from the checkpoint of step {result.resumed_from}: {lost} steps lost and repeated")

    def _finish(self) -> None:
        self._begin("to the end, on both nodes")
        screen = self.until(lambda screen: self._job(screen)["state"] == "COMPLETED", "the training to end")
        self.result.attempts = 1 + self._job(screen)["attempt"]
        self.say("good", f"job {self.result.job_id} is COMPLETED, in {self.result.attempts} attempts")
        deadline_s = time.monotonic() + AFTER_S
        while self._has_live_jobs(self.show()) and time.monotonic() < deadline_s:
            time.sleep(FRAME_S)
        for name, waited_for in (("report", "the training"), ("census", "three nodes")):
            lines = read_end(self._cluster.share / f"{name}.out").splitlines()
            printed = "; ".join(line[:60] for line in lines) or "has not run yet"
            self.say("note", f"{name}, which waited for {waited_for}: {printed}")
        self.result.run = self.look().run
        self._begin("the end")

    # ----- what the acts wait for

    def _job(self, screen: ClusterScreen) -> dict[str, Any]:
        """Return the training job. Raises UnavailableError if it is not in the queue."""
        if screen.job is None:
            raise UnavailableError(f"job {self.result.job_id} is no longer in the queue")
        return dict(screen.job)

    def _runs(self, screen: ClusterScreen) -> bool:
        return bool(self._job(screen)["state"] == "RUNNING")

    def _has_run(self, screen: ClusterScreen) -> bool:
        """Return whether the training runs, or has run since the last look."""
        return self._job(screen)["state"] in ("RUNNING", "COMPLETING", "COMPLETED")

    def _is_well(self, screen: ClusterScreen) -> bool:
        nodes_up = all(node["link"] == "up" for node in screen.nodes)
        return screen.controller is not None and nodes_up and self._runs(screen)

    def _is_time_to_lose(self, screen: ClusterScreen) -> bool:
        """Return whether half of the training, and half of the way to a checkpoint, is done."""
        run, at = screen.run, self._plan.node_dies_at
        if len(run.checkpoints) < 2 or run.done < at:
            return False
        since = (run.step - run.checkpoints[-1].step) / self._plan.checkpoint_every
        return 0.4 <= since <= 0.7 or run.done > at + 0.15

    def _is_down(self, screen: ClusterScreen, name: str) -> bool:
        node = screen.node(name)
        return node is not None and node["state"] == "DOWN" and self._job(screen)["reason"] == "NodeDown"

    def _has_live_jobs(self, screen: ClusterScreen) -> bool:
        return any(job.state in {"PENDING", *ACTIVE_STATES} and "_" not in job.display_id for job in screen.queue)

    # ----- waiting

    def until(
        self,
        happened: Callable[[ClusterScreen], bool],
        what: str,
        limit_s: float | None = None,
        *,
        job_may_end: bool = False,
    ) -> ClusterScreen:
        """Show the cluster until `happened`.

        Without a limit, for as long as the training makes progress.

        Raises UnavailableError after `limit_s` seconds, or if the training has ended.
        """
        progress, deadline_s = None, time.monotonic() + (STALL_S if limit_s is None else limit_s)
        while True:
            screen = self.show()
            if happened(screen):
                return screen
            state = screen.job["state"] if screen.job is not None else ""
            if state in BAD_ENDS and not job_may_end:
                raise UnavailableError(f"the training job ended as {state}: {self._status(screen)}")
            now = (screen.run.attempt, screen.run.step)
            if limit_s is None and state == "COMPLETED" and screen.controller is not None:
                raise UnavailableError(f"waited for {what}, but the training is over; {self._status(screen)}")
            if limit_s is None and now != progress:
                progress, deadline_s = now, time.monotonic() + STALL_S
            if time.monotonic() > deadline_s:
                span = f"{limit_s:g} s" if limit_s is not None else f"{STALL_S:g} s without a training step"
                raise UnavailableError(f"waited {span} for {what}; {self._status(screen)}")
            time.sleep(FRAME_S)

    def _status(self, screen: ClusterScreen) -> str:
        """Return the state of controller and training, for an error."""
        job = screen.job
        if screen.controller is None:
            return "the controller does not answer"
        if job is None:
            return "the training job is not in the queue"
        why = f", {job['reason']} {job['reason_detail']}".rstrip() if job["reason"] != "None" else ""
        exit_code = f", exit code {job['exit_code']}" if job["exit_code"] else ""
        return f"job {job['id']} is {job['state']} (attempt {job['attempt']}{exit_code}{why}), step {screen.run.step}"

    def meanwhile(self, work: Callable[[], T]) -> T:
        """Do `work` while the cluster is shown, and return its result.

        Raises its UnavailableError.
        """
        results: list[T] = []
        errors: list[UnavailableError] = []

        def do() -> None:
            try:
                results.append(work())
            except UnavailableError as error:
                errors.append(error)

        thread = threading.Thread(target=do, daemon=True)
        thread.start()
        while thread.is_alive():
            self.show()
            thread.join(FRAME_S)
        if errors or not results:
            raise errors[0] if errors else UnavailableError("cannot read the answer of the cluster's keeper")
        return results[0]

    def _pause(self, seconds: float, *, watch: bool = False) -> None:
        """Give people time to read; with `watch`, the cluster is shown."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if watch:
                self.show()
            time.sleep(min(FRAME_S, left_s))

    def show(self) -> ClusterScreen:
        """Look at the cluster, and show it."""
        screen = self.look()
        subtitle = f"{self.elapsed_s() // 60:.0f}:{self.elapsed_s() % 60:02.0f}  {self._act}"
        self._stage.frame(Scene(cluster=screen, subtitle=subtitle, story=tuple(self._lines)), self.elapsed_s())
        return screen

    def look(self) -> ClusterScreen:
        """Return the cluster as it is now, with the training job."""
        return self._reader.look(self.result.job_id)

    def elapsed_s(self) -> float:
        """Return the seconds since the story began."""
        return time.monotonic() - self._began_s

    def _begin(self, act: str) -> None:
        self._act = act
        self.say("act", act)

    def say(self, kind: str, text: str) -> None:
        """Add one line to the story."""
        self._lines.append(StoryLine(at_s=self.elapsed_s(), kind=kind, text=text))
        self._stage.tell(self._lines[-1])


def node_facts(node: dict[str, Any]) -> str:
    """Return what is known of a node, in one line."""
    facts = node["facts"] or {}
    parts = [f"{plural(node['cpus'], 'cpu')} and {node['mem_mib'] / 1024:g} GiB for jobs"]
    parts += [f"Python {facts['python']}"] if facts.get("python") else []
    parts += [f"Linux {str(facts['kernel']).split('-')[0]}"] if facts.get("kernel") else []
    parts += [f"host name {facts['hostname']}"] if facts.get("hostname") else []
    return ", ".join(parts)


def read_end(path: Path, limit_bytes: int = 2000) -> str:
    """Return the end of a file as text, from the first whole line on; "" if it cannot be read."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - limit_bytes))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if size > limit_bytes else text
