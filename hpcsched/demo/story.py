"""The story: three machines, a training on two of them, a controller that dies, a machine that dies, and a trained model.

Read `Story.run` from top to bottom. Each act asks for something, then waits for what has to follow, and fails with
words if it does not. Knows no terminal (`stage`) and owns no process (`keeper`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hpcsched.demo.cluster import LocalCluster
from hpcsched.demo.jobs import OUT_DIR, TRAIN_NAME, SideJob, side_jobs, training_script
from hpcsched.demo.keeper import Keeper
from hpcsched.demo.scene import Moment, Observer, Scene
from hpcsched.demo.stage import Stage
from hpcsched.demo.training import Training
from hpcsched.errors import UnavailableError

FRAME_S = 0.25
START_S = 60.0  # a submitted job is running by then
FIRST_STEP_S = 120.0  # importing torch twice on a busy machine
STALL_S = 60.0  # the longest time between two steps
DOWN_S = 30.0
RECONNECT_S = 45.0
AFTER_S = 30.0  # what the small jobs have when the training is done
BAD_ENDS = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is played. The parts of the training after which things happen are from 0 to 1."""

    python: str
    training_options: tuple[str, ...]
    side_tasks: int
    checkpoint_every: int
    controller_dies_at: float = 0.2
    controller_away_s: float = 4.0
    node_dies_at: float = 0.5
    limbo_s: float = 6.0  # how long one may read why the job is in limbo
    read_s: float = 0.0  # how long one may read the job script


@dataclass(slots=True)
class Outcome:
    """What came of it, for the closing table. Times in seconds."""

    server: str = ""
    cluster_up_s: float = 0.0
    job_id: int = 0
    start_s: float = 0.0  # from hsub to RUNNING
    controller_away_s: float = 0.0
    steps_without_controller: int = 0
    lost_node: str = ""
    detect_s: float = 0.0  # from the power cut to DOWN
    down_for_s: float = 0.0  # from the power cut to the power
    requeue_s: float = 0.0  # from the node's start to the new attempt running
    resume_s: float = 0.0  # from the node's start to its first step
    resumed_from: int = 0
    lost_at: int = 0  # the step that was done last
    acts_s: dict[str, float] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    total_s: float = 0.0


class Story:
    """One performance."""

    def __init__(self, cluster: LocalCluster, keeper: Keeper, stage: Stage, plan: Plan) -> None:
        self._cluster, self._keeper, self._stage, self._plan = cluster, keeper, stage, plan
        self._began_s = time.monotonic()
        self._told: list[Moment] = []
        self._title = ""
        self._act_began_s = self._began_s
        self._outcome = Outcome()
        self._observer = Observer(cluster, cluster.share / OUT_DIR / "metrics.jsonl")

    @property
    def job_id(self) -> int:
        """The training job's number; 0 before it was submitted."""
        return self._outcome.job_id

    def run(self) -> Outcome:
        """Play it all; raises UnavailableError where something does not happen in time."""
        self._raise_cluster()
        self._submit()
        self._wait_for_checkpoint()
        self._kill_controller()
        self._cut_power()
        self._resume()
        self._finish()
        self._outcome.total_s = self._elapsed_s()
        return self._outcome

    # ----- acts

    def _raise_cluster(self) -> None:
        self._act("cluster", "three machines")
        began_s = time.monotonic()
        up = self._keeper.ask("machines")
        self._outcome.server = up["server"]
        who = "OpenSSH's sshd" if up["server"] == "sshd" else "the embedded SSH server (no sshd that can be used here)"
        self._say("note", f"n1, n2, n3 answer to SSH on loopback, behind {who} ({time.monotonic() - began_s:.1f} s)")
        self._keeper.ask("up")
        self._keeper.ask("connect")
        self._outcome.cluster_up_s = time.monotonic() - began_s
        took = f"{self._outcome.cluster_up_s:.1f} s"
        self._say(
            "good", f"hpcschedd runs; it has put its agent onto each node and asked what is there ({took} in all)"
        )
        for line in self._facts():
            self._say("note", line)

    def _facts(self) -> list[str]:
        nodes = self._cluster.api("GET", "/v1/nodes?probe=1")["nodes"]
        return [f"{node['name']}: {node_facts(node)}" for node in nodes]

    def _submit(self) -> None:
        self._act("submit", "a training job on two of the three nodes")
        text = training_script(self._plan.python, self._plan.training_options)
        (self._cluster.share / f"{TRAIN_NAME}.sh").write_text(text)
        self._stage.show(text.rstrip().splitlines())
        said = self._cluster.run("hsub", f"{TRAIN_NAME}.sh").stdout.strip()
        self._say("note", f"$ hsub {TRAIN_NAME}.sh   ->  {said}")
        self._outcome.job_id = int(said.split()[-1])
        self._observer.log_file = self._cluster.share / f"{TRAIN_NAME}-{self._outcome.job_id}.out"
        for job in side_jobs(self._outcome.job_id, tasks=self._plan.side_tasks):
            self._submit_beside(job)
        self._pause(self._plan.read_s)
        self._until(self._is_running, START_S, "the training job to start")
        self._outcome.start_s = max(0.0, self._started_at_s() - self._submitted_at_s())
        self._say("good", f"job {self._outcome.job_id} runs on {self._nodes_text()}: mpirun, one rank on each node")

    def _submit_beside(self, job: SideJob) -> None:
        (self._cluster.share / job.file).write_text(job.text)
        said = self._cluster.run("hsub", *job.options, job.file).stdout.strip()
        self._say("note", f"$ hsub {' '.join((*job.options, job.file))}   ->  job {said.split()[-1]}: {job.what}")

    def _wait_for_checkpoint(self) -> None:
        self._act("train", "training on two nodes")
        self._until(lambda scene: bool(scene.training.points), FIRST_STEP_S, "the first training step")
        self._say("note", "the ranks have found each other: the loss is going down")
        scene = self._until_trained(lambda scene: bool(scene.training.checkpoints), "the first checkpoint")
        made = scene.training.checkpoints[0]
        self._say("good", f"first checkpoint on the share: step {made.step}, {made.size_bytes / 1e6:.1f} MB")

    def _kill_controller(self) -> None:
        part = self._plan.controller_dies_at
        self._until_trained(lambda scene: scene.training.done >= part, "more steps")
        self._act("controller", "the controller dies, the job does not notice")
        before = self._look().training.step
        died_s = time.monotonic()
        pid = self._meanwhile(lambda: self._keeper.ask("kill_controller"))["pid"]
        self._say("bad", f"hpcschedd (pid {pid}) is killed with SIGKILL")
        self._until_trained(
            lambda scene: time.monotonic() > died_s + self._plan.controller_away_s and scene.training.step > before,
            "steps without a controller",
        )
        self._meanwhile(lambda: self._keeper.ask("up"))
        scene = self._until(self._all_well_again, RECONNECT_S, "the controller to find its nodes and job again")
        self._outcome.controller_away_s = time.monotonic() - died_s
        self._outcome.steps_without_controller = scene.training.step - before
        self._say(
            "good",
            f"it is back after {self._outcome.controller_away_s:.1f} s and has found job {self._outcome.job_id} running: "
            f"{self._outcome.steps_without_controller} steps were done meanwhile",
        )

    def _all_well_again(self, scene: Scene) -> bool:
        nodes_up = all(node["link"] == "up" for node in scene.nodes)
        return scene.controller is not None and nodes_up and self._is_running(scene)

    def _cut_power(self) -> None:
        scene = self._until_trained(self._worth_killing, "half of the training and two checkpoints")
        node = self._job(scene)["nodes"][0]
        self._act("power", f"{node} loses power")
        off_s = time.monotonic()
        count = self._meanwhile(lambda: self._keeper.ask("power_off", node))["killed"]
        self._outcome.lost_node = node
        self._outcome.lost_at = self._look().training.step
        self._say("bad", f"{node} loses power: {count} processes are gone, rank 0 and the job's script among them")
        self._until(lambda scene: self._is_down(scene, node), DOWN_S, f"{node} to be seen as DOWN", job_may_end=True)
        self._outcome.detect_s = time.monotonic() - off_s
        self._say(
            "bad", f"{node} is DOWN, seen after {self._outcome.detect_s:.1f} s; job {self._outcome.job_id} is in limbo"
        )
        self._say(
            "note", "it is not started elsewhere: the machine may only be out of reach, and nothing may run twice"
        )
        self._pause(self._plan.limbo_s, watch=True)
        on_s = time.monotonic()
        self._meanwhile(lambda: self._keeper.ask("power_on", node))
        self._outcome.down_for_s = time.monotonic() - off_s
        self._act_began_s = on_s
        self._say("note", f"{node} has power again: a new boot id proves that nothing of the old attempt is left")
        self._on_s = on_s

    def _worth_killing(self, scene: Scene) -> bool:
        training = scene.training
        if len(training.checkpoints) < 2 or training.done < self._plan.node_dies_at:
            return False
        since = training.step - training.checkpoints[-1].step
        return since >= self._plan.checkpoint_every * 0.5 or training.done > self._plan.node_dies_at + 0.2

    def _is_down(self, scene: Scene, name: str) -> bool:
        node = scene.node(name)
        return node is not None and node["state"] == "DOWN" and self._job(scene)["reason"] == "NodeDown"

    def _resume(self) -> None:
        self._act("resume", "queued again, and back to the last checkpoint")
        self._until(lambda scene: self._job(scene)["attempt"] >= 1, RECONNECT_S, "the job to be queued again")
        self._say("good", f"job {self._outcome.job_id} is in the queue again by itself, as attempt 1")
        self._until(self._is_running, START_S, "the new attempt to start")
        self._outcome.requeue_s = time.monotonic() - self._on_s
        self._say("note", f"attempt 1 runs on {self._nodes_text()}")
        scene = self._until(lambda scene: scene.training.attempt >= 1, FIRST_STEP_S, "the new attempt's first step")
        self._outcome.resume_s = time.monotonic() - self._on_s
        _, step, _ = scene.training.resumes[-1]
        self._outcome.resumed_from = step
        self._outcome.lost_at = max(point.step for point in scene.training.points if point.attempt == 0)
        lost = len(scene.training.lost)
        self._say("good", f"resumed from the checkpoint of step {step}: {lost} steps were lost and are done again")

    def _finish(self) -> None:
        self._act("finish", "to the end, on both nodes")
        scene = self._until_trained(lambda scene: self._job(scene)["state"] == "COMPLETED", "the training to end")
        self._outcome.training = scene.training
        self._say("good", f"job {self._outcome.job_id} is COMPLETED, in two attempts")
        self._say("note", "what waited for it runs now: report (afterok), census (all three nodes)")
        self._until_if(self._nothing_waits, AFTER_S)
        self._outcome.training = self._look().training
        self._act("", "the end")

    def _nothing_waits(self, scene: Scene) -> bool:
        return not any(
            job["state"] in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING") and job["array_job_id"] is None
            for job in scene.jobs
        )

    # ----- how an act waits

    def _until(
        self, happened: Callable[[Scene], bool], limit_s: float, what: str, *, job_may_end: bool = False
    ) -> Scene:
        """Show scenes until `happened`; raises UnavailableError after `limit_s`, or when the training has failed."""
        deadline_s = time.monotonic() + limit_s
        while True:
            scene = self._show()
            if happened(scene):
                return scene
            if not job_may_end:
                self._refuse_bad_end(scene)
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"waited {limit_s:g} s for {what}; {self._standing(scene)}")
            time.sleep(FRAME_S)

    def _until_if(self, happened: Callable[[Scene], bool], limit_s: float) -> None:
        """Show scenes until `happened`, or until `limit_s` is over."""
        deadline_s = time.monotonic() + limit_s
        while not happened(self._show()) and time.monotonic() < deadline_s:
            time.sleep(FRAME_S)

    def _until_trained(self, happened: Callable[[Scene], bool], what: str) -> Scene:
        """Show scenes until `happened`, for as long as the training makes steps."""
        progress, deadline_s = (-1, -1), 0.0
        while True:
            scene = self._show()
            if happened(scene):
                return scene
            self._refuse_bad_end(scene)
            now = (scene.training.attempt, scene.training.step)
            if now != progress:
                progress, deadline_s = now, time.monotonic() + STALL_S
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"waited for {what}: no training step within {STALL_S:g} s; {self._standing(scene)}"
                )
            if self._job_over(scene):
                raise UnavailableError(f"waited for {what}, but the training is over; {self._standing(scene)}")
            time.sleep(FRAME_S)

    def _job_over(self, scene: Scene) -> bool:
        job = scene.job(self._outcome.job_id)
        return scene.controller is not None and job is not None and job["state"] == "COMPLETED"

    def _refuse_bad_end(self, scene: Scene) -> None:
        job = scene.job(self._outcome.job_id)
        if job is not None and job["state"] in BAD_ENDS:
            raise UnavailableError(f"the training job ended as {job['state']}: {self._standing(scene)}")

    def _standing(self, scene: Scene) -> str:
        """Say how things stand, for an error."""
        if scene.controller is None:
            return "the controller does not answer"
        job = scene.job(self._outcome.job_id)
        if job is None:
            return "the training job is not in the queue"
        why = f", {job['reason']} {job['reason_detail']}".rstrip() if job["reason"] != "None" else ""
        exit_code = f", exit code {job['exit_code']}" if job["exit_code"] else ""
        return (
            f"job {job['id']} is {job['state']} (attempt {job['attempt']}{exit_code}{why}), step {scene.training.step}"
        )

    def _meanwhile(self, work: Callable[[], T]) -> T:
        """Do `work` while the scene goes on."""
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
            self._show()
            thread.join(FRAME_S)
        if errors:
            raise errors[0]
        if not results:
            raise UnavailableError("the cluster's keeper gave an answer that cannot be read")
        return results[0]

    def _pause(self, seconds: float, *, watch: bool = False) -> None:
        """Let people read; with `watch` the scene goes on."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if watch:
                self._show()
            time.sleep(min(FRAME_S, left_s))

    # ----- small things

    def _show(self) -> Scene:
        scene = self._look()
        self._stage.frame(scene)
        return scene

    def _look(self) -> Scene:
        return self._observer.look(
            elapsed_s=self._elapsed_s(), now_s=time.time(), title=self._title, story=tuple(self._told)
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _act(self, name: str, title: str) -> None:
        now_s = time.monotonic()
        self._outcome.acts_s[name] = now_s - self._began_s
        self._act_began_s = now_s
        self._title = title
        self._say("act", title)

    def _say(self, kind: str, text: str) -> None:
        moment = Moment(at_s=self._elapsed_s(), kind=kind, text=text)
        self._told.append(moment)
        self._stage.tell(moment)

    def _job(self, scene: Scene) -> dict[str, Any]:
        job = scene.job(self._outcome.job_id)
        if job is None:
            raise UnavailableError(f"job {self._outcome.job_id} is not in the queue any more")
        return dict(job)

    def _is_running(self, scene: Scene) -> bool:
        return self._job(scene)["state"] == "RUNNING"

    def _nodes_text(self) -> str:
        return str(self._job(self._look())["node_list"])

    def _started_at_s(self) -> float:
        return float(self._job(self._look())["started_at_s"] or 0.0)

    def _submitted_at_s(self) -> float:
        return float(self._job(self._look())["submitted_at_s"])


def node_facts(node: dict[str, Any]) -> str:
    """Return what `hinfo` knows of a node, in a line."""
    facts = node["facts"] or {}
    parts = [f"{node['cpus']} cpus and {node['mem_mib'] / 1024:g} GiB given to jobs"]
    if facts.get("python"):
        parts.append(f"Python {facts['python']}")
    if facts.get("kernel"):
        parts.append(f"Linux {str(facts['kernel']).split('-')[0]}")
    if facts.get("hostname"):
        parts.append(f"calls itself {facts['hostname']}")
    return ", ".join(parts)


def share_file(cluster: LocalCluster, *parts: str) -> Path:
    """Return the path of a file on the cluster's share."""
    return cluster.share.joinpath(*parts)
