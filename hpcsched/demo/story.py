"""The story: three machines, a training on two of them, a controller that dies, a machine that dies, and a trained model.

Read `Story.run` from top to bottom. Each act asks for something, then waits for what has to follow, and fails with
words if it does not. Knows no terminal (`stage`) and owns no process (`keeper`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from hpcsched.demo.cluster import LocalCluster
from hpcsched.demo.jobs import OUT_DIR, TRAIN_NAME, SideJob, side_jobs, training_script
from hpcsched.demo.keeper import Keeper
from hpcsched.demo.scene import Observer, Scene, tail_lines
from hpcsched.demo.stage import Stage
from hpcsched.demo.training import Training
from hpcsched.demo.watch import Watch

START_S = 60.0  # a submitted job is running by then
FIRST_STEP_S = 120.0  # importing torch twice on a busy machine
DOWN_S = 30.0
RECONNECT_S = 60.0
AFTER_S = 30.0  # what the small jobs have when the training is done


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
    training: Training = field(default_factory=Training)
    total_s: float = 0.0


class Story:
    """One performance."""

    def __init__(self, cluster: LocalCluster, keeper: Keeper, stage: Stage, plan: Plan) -> None:
        self._cluster, self._keeper, self._stage, self._plan = cluster, keeper, stage, plan
        self._outcome = Outcome()
        self._observer = Observer(cluster, cluster.share / OUT_DIR / "metrics.jsonl")
        self._watch = Watch(self._observer, stage)
        self._on_s = 0.0  # when the lost node got its power back

    @property
    def job_id(self) -> int:
        """The training job's number; 0 before it was submitted."""
        return self._watch.job_id

    def run(self) -> Outcome:
        """Play it all; raises UnavailableError where something does not happen in time."""
        self._raise_cluster()
        self._submit()
        self._wait_for_checkpoint()
        self._kill_controller()
        self._cut_power()
        self._resume()
        self._finish()
        self._outcome.total_s = self._watch.elapsed_s()
        return self._outcome

    # ----- acts

    def _raise_cluster(self) -> None:
        self._watch.act("three machines")
        began_s = time.monotonic()
        up = self._keeper.ask("machines")
        self._outcome.server = up["server"]
        who = "OpenSSH's sshd" if up["server"] == "sshd" else "the embedded SSH server"
        self._watch.say("note", f"n1, n2, n3 answer on loopback, behind {who} ({time.monotonic() - began_s:.1f} s)")
        self._keeper.ask("up")
        self._keeper.ask("connect")
        self._outcome.cluster_up_s = time.monotonic() - began_s
        took = f"{self._outcome.cluster_up_s:.1f} s"
        self._watch.say("good", f"hpcschedd runs, and its agent answers on every node ({took} in all)")
        for line in self._facts():
            self._watch.say("note", line)

    def _facts(self) -> list[str]:
        nodes = self._cluster.api("GET", "/v1/nodes?probe=1")["nodes"]
        return [f"{node['name']}: {node_facts(node)}" for node in nodes]

    def _submit(self) -> None:
        self._watch.act("a training job on two of the three nodes")
        text = training_script(self._plan.python, self._plan.training_options)
        (self._cluster.share / f"{TRAIN_NAME}.sh").write_text(text)
        self._stage.show(text.rstrip().splitlines())
        said = self._cluster.run("hsub", f"{TRAIN_NAME}.sh").stdout.strip()
        self._watch.say("note", f"$ hsub {TRAIN_NAME}.sh   ->  {said}")
        self._watch.job_id = self._outcome.job_id = int(said.split()[-1])
        self._observer.log_file = self._cluster.share / f"{TRAIN_NAME}-{self.job_id}.out"
        for job in side_jobs(self.job_id, tasks=self._plan.side_tasks):
            self._submit_beside(job)
        self._watch.pause(self._plan.read_s)
        self._watch.until(self._watch.is_running, START_S, "the training job to start")
        job = self._watch.job(self._watch.look())
        self._outcome.start_s = job["started_at_s"] - job["submitted_at_s"]
        self._watch.say("good", f"job {self.job_id} runs on {job['node_list']}: mpirun, one rank on each node")

    def _submit_beside(self, job: SideJob) -> None:
        (self._cluster.share / job.file).write_text(job.text)
        said = self._cluster.run("hsub", *job.options, job.file).stdout.strip()
        self._watch.say("note", f"$ hsub {' '.join((*job.options, job.file))}   ->  job {said.split()[-1]}: {job.what}")

    def _wait_for_checkpoint(self) -> None:
        self._watch.act("training on two nodes")
        self._watch.until(lambda scene: bool(scene.training.points), FIRST_STEP_S, "the first training step")
        self._watch.say("note", "the ranks have found each other: the loss is going down")
        scene = self._watch.until_trained(lambda scene: bool(scene.training.checkpoints), "the first checkpoint")
        made = scene.training.checkpoints[0]
        self._watch.say("good", f"first checkpoint on the share: step {made.step}, {made.size_bytes / 1e6:.1f} MB")

    def _kill_controller(self) -> None:
        part = self._plan.controller_dies_at
        self._watch.until_trained(lambda scene: scene.training.done >= part, "more steps")
        self._watch.act("the controller dies, the job does not notice")
        before = self._watch.look().training.step
        died_s = time.monotonic()
        pid = self._watch.meanwhile(lambda: self._keeper.ask("kill_controller"))["pid"]
        self._watch.say("bad", f"hpcschedd (pid {pid}) is killed with SIGKILL")
        self._watch.until_trained(
            lambda scene: time.monotonic() > died_s + self._plan.controller_away_s and scene.training.step > before,
            "steps without a controller",
        )
        self._watch.meanwhile(lambda: self._keeper.ask("up"))
        scene = self._watch.until(self._all_well_again, RECONNECT_S, "the controller to find its nodes and job again")
        self._outcome.controller_away_s = time.monotonic() - died_s
        self._outcome.steps_without_controller = scene.training.step - before
        self._watch.say(
            "good",
            f"back after {self._outcome.controller_away_s:.1f} s, it finds job {self.job_id} running: "
            f"{self._outcome.steps_without_controller} steps done meanwhile",
        )

    def _all_well_again(self, scene: Scene) -> bool:
        nodes_up = all(node["link"] == "up" for node in scene.nodes)
        return scene.controller is not None and nodes_up and self._watch.is_running(scene)

    def _cut_power(self) -> None:
        scene = self._watch.until_trained(self._worth_killing, "half of the training and two checkpoints")
        node = self._watch.job(scene)["nodes"][0]
        self._watch.act(f"{node} loses power")
        off_s = time.monotonic()
        count = self._watch.meanwhile(lambda: self._keeper.ask("power_off", node))["killed"]
        self._outcome.lost_node = node
        self._outcome.lost_at = self._watch.look().training.step
        self._watch.say("bad", f"{count} processes on {node} are gone, the job's script and rank 0 among them")
        self._watch.until(
            lambda scene: self._is_down(scene, node), DOWN_S, f"{node} to be seen as DOWN", job_may_end=True
        )
        self._outcome.detect_s = time.monotonic() - off_s
        self._watch.say("bad", f"{node} is DOWN after {self._outcome.detect_s:.1f} s, job {self.job_id} in limbo")
        self._watch.say(
            "note", "it may still run behind a cut cable, so it is not started elsewhere: nothing runs twice"
        )
        self._watch.pause(self._plan.limbo_s, watch=True)
        self._on_s = time.monotonic()
        self._watch.meanwhile(lambda: self._keeper.ask("power_on", node))
        self._outcome.down_for_s = time.monotonic() - off_s
        self._watch.say("note", f"{node} boots: its new boot id proves that nothing of the old attempt runs")

    def _worth_killing(self, scene: Scene) -> bool:
        """Half-way, with checkpoints, and between two of them: so that something is lost. Not waited for too long."""
        training = scene.training
        if len(training.checkpoints) < 2 or training.done < self._plan.node_dies_at:
            return False
        since = (training.step - training.checkpoints[-1].step) / self._plan.checkpoint_every
        return 0.4 <= since <= 0.7 or training.done > self._plan.node_dies_at + 0.15

    def _is_down(self, scene: Scene, name: str) -> bool:
        node = scene.node(name)
        return node is not None and node["state"] == "DOWN" and self._watch.job(scene)["reason"] == "NodeDown"

    def _resume(self) -> None:
        self._watch.act("queued again, and back to the last checkpoint")
        self._watch.until(
            lambda scene: self._watch.job(scene)["attempt"] >= 1, RECONNECT_S, "the job to be queued again"
        )
        self._watch.say("good", f"job {self.job_id} is in the queue again by itself, as attempt 1")
        scene = self._watch.until(self._watch.has_run, START_S, "the new attempt to start")
        self._outcome.requeue_s = time.monotonic() - self._on_s
        self._watch.say("note", f"attempt 1 runs on {self._watch.job(scene)['node_list']}")
        scene = self._watch.until(
            lambda scene: scene.training.attempt >= 1, FIRST_STEP_S, "the new attempt's first step"
        )
        self._outcome.resume_s = time.monotonic() - self._on_s
        _, step, _ = scene.training.resumes[-1]
        self._outcome.resumed_from = step
        self._outcome.lost_at = max(point.step for point in scene.training.points if point.attempt == 0)
        lost = len(scene.training.lost)
        self._watch.say("good", f"resumed from the checkpoint of step {step}: {lost} steps are lost and done again")

    def _finish(self) -> None:
        self._watch.act("to the end, on both nodes")
        scene = self._watch.until_trained(
            lambda scene: self._watch.job(scene)["state"] == "COMPLETED", "the training to end"
        )
        self._outcome.training = scene.training
        self._watch.say("good", f"job {self.job_id} is COMPLETED, in two attempts")
        self._watch.until_if(self._nothing_waits, AFTER_S)
        self._watch.say("note", f"report, which waited for it: {self._said_by('report')}")
        self._watch.say("note", f"census, which waited for three nodes: {self._said_by('census')}")
        self._outcome.training = self._watch.look().training
        self._watch.act("the end")

    def _said_by(self, name: str) -> str:
        lines = tail_lines(self._cluster.share / f"{name}.out", 1000)
        return "; ".join(line[:60] for line in lines) or "has not run yet"

    def _nothing_waits(self, scene: Scene) -> bool:
        return not any(
            job["state"] in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING") and job["array_job_id"] is None
            for job in scene.jobs
        )


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
