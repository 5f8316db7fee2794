"""The story: three machines, a training on two of them, a controller that dies, a machine that dies, and a trained model.

Read `Story.run` from top to bottom. Each act asks for something, then waits for what has to follow, and fails with
words if it does not. Knows no terminal (`stage`) and owns no process (`keeper`).
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpcsched.demo.keeper import Keeper
from hpcsched.demo.training import Training
from hpcsched.demo.view import Moment, Observer, Scene, clock, moment_text, picture, tail_lines
from hpcsched.errors import UnavailableError
from hpcsched.loopback.cluster import LocalCluster
from hpcsched.sched.explain.sentences import plural

# ----- where the story is shown: live on a terminal, or as plain lines with times where there is none
# Knows how things are written, not what happens. Plain lines bear no escape codes; NO_COLOR is respected (by rich).


PLAIN_EVERY_STEPS = 10
PLAIN_LINES_MAX = 60  # a long training tells its loss less often


class Stage(Protocol):
    """What the story needs of a stage. `plain`: nobody watches it live."""

    plain: bool

    def heading(self, text: str) -> None:
        """Begin something new on the ordinary screen."""

    def tell(self, moment: Moment) -> None:
        """Say one line of the story."""

    def show(self, lines: Sequence[str]) -> None:
        """Show some lines of text as they are: a script, a sample."""

    def frame(self, scene: Scene) -> None:
        """Show the scene as it is now."""

    def curtain(self) -> None:
        """End the live view; what follows is ordinary output."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names with what belongs to them."""


class PlainStage:
    """Lines on stdout, each with the time."""

    plain = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: tuple[int, int] = (0, 0)  # attempt, step

    def tell(self, moment: Moment) -> None:
        self._line(moment.at_s, moment.text)

    def heading(self, text: str) -> None:
        self._console.print(Text(text))

    def show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(Text("      | " + line), soft_wrap=True)

    def frame(self, scene: Scene) -> None:
        training = scene.training
        every = max(PLAIN_EVERY_STEPS, -(-(training.total_steps or 0) // PLAIN_LINES_MAX))
        attempt, step = self._told
        due = training.step >= step + every or training.attempt > attempt or training.step < step
        if training.points and (due or (training.step == training.total_steps and step < training.step)):
            self._told = (training.attempt, training.step)
            self._line(scene.elapsed_s, loss_line(training))

    def curtain(self) -> None:
        pass

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        for name, value in rows:
            self._console.print(Text(f"{name:<18} {value}"), soft_wrap=True)

    def _line(self, at_s: float, text: str) -> None:
        self._console.print(Text(f"{clock(at_s):>5} {text}"), soft_wrap=True)


class LiveStage:
    """The terminal's other screen, redrawn in place; the story is printed on the ordinary one when it is over."""

    plain = False

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._unsaid: list[Moment] = []

    def tell(self, moment: Moment) -> None:
        if self._live is None:
            self._console.print(moment_text(moment), soft_wrap=True)
        else:
            self._unsaid.append(moment)

    def heading(self, text: str) -> None:
        self._console.print(Text("\n" + text, style="bold"))

    def show(self, lines: Sequence[str]) -> None:
        if self._live is None:
            for line in lines:
                style = "cyan" if line.startswith("#HSUB") else "dim"
                self._console.print(Text("       │ " + line, style=style))

    def frame(self, scene: Scene) -> None:
        if self._live is None:
            self._live = Live(console=self._console, screen=True, auto_refresh=False)
            self._live.start()
        width, height = self._console.size
        self._live.update(picture(scene, width, height), refresh=True)

    def curtain(self) -> None:
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        for moment in self._unsaid:
            self._console.print(moment_text(moment), soft_wrap=True)
        self._unsaid.clear()

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, value in rows:
            table.add_row(f"  {name}", Text(value))
        self._console.print(table)


def loss_line(training: Training) -> str:
    """Return the last step as one plain line."""
    text = f"step {training.step}/{training.total_steps or '?'}  loss {training.points[-1].loss:.3f}"
    if training.kept_validation:
        text += f"  validation {training.kept_validation[-1].loss:.3f}"
    if training.checkpoints:
        text += f"  last checkpoint: step {training.checkpoints[-1].step}"
    return text


def make_stage(console: Console, *, plain: bool) -> Stage:
    """Return the stage for this console: plain if asked for, or if nobody looks at it."""
    if plain or not console.is_terminal or console.is_dumb_terminal or (console.encoding or "").lower() != "utf-8":
        return PlainStage(console)
    return LiveStage(console)


# ----- how the story waits: it shows scenes until something has happened, and says in words when it does not
# Knows the clock, the stage and one training job; not what is played.


FRAME_S = 0.25
STALL_S = 60.0  # the longest time between two steps
BAD_ENDS = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")

T = TypeVar("T")


class Watch:
    """Looks at the cluster again and again, and has the stage show it. `job_id` is the training's, 0 before it has one."""

    def __init__(self, observer: Observer, stage: Stage) -> None:
        self.job_id = 0
        self._observer, self._stage = observer, stage
        self._began_s = time.monotonic()
        self._told: list[Moment] = []
        self._title = ""

    def until(
        self, happened: Callable[[Scene], bool], limit_s: float, what: str, *, job_may_end: bool = False
    ) -> Scene:
        """Show scenes until `happened`; raises UnavailableError after `limit_s`, or when the training has failed."""
        deadline_s = time.monotonic() + limit_s
        while True:
            scene = self.show()
            if happened(scene):
                return scene
            if not job_may_end:
                self._refuse_bad_end(scene)
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"waited {limit_s:g} s for {what}; {self._standing(scene)}")
            time.sleep(FRAME_S)

    def until_if(self, happened: Callable[[Scene], bool], limit_s: float) -> None:
        """Show scenes until `happened`, or until `limit_s` is over."""
        deadline_s = time.monotonic() + limit_s
        while not happened(self.show()) and time.monotonic() < deadline_s:
            time.sleep(FRAME_S)

    def until_trained(self, happened: Callable[[Scene], bool], what: str) -> Scene:
        """Show scenes until `happened`, for as long as the training makes steps."""
        progress, deadline_s = (-1, -1), 0.0
        while True:
            scene = self.show()
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
        job = scene.job(self.job_id)
        return scene.controller is not None and job is not None and job["state"] == "COMPLETED"

    def _refuse_bad_end(self, scene: Scene) -> None:
        job = scene.job(self.job_id)
        if job is not None and job["state"] in BAD_ENDS:
            raise UnavailableError(f"the training job ended as {job['state']}: {self._standing(scene)}")

    def _standing(self, scene: Scene) -> str:
        """Say how things stand, for an error."""
        if scene.controller is None:
            return "the controller does not answer"
        job = scene.job(self.job_id)
        if job is None:
            return "the training job is not in the queue"
        why = f", {job['reason']} {job['reason_detail']}".rstrip() if job["reason"] != "None" else ""
        exit_code = f", exit code {job['exit_code']}" if job["exit_code"] else ""
        return (
            f"job {job['id']} is {job['state']} (attempt {job['attempt']}{exit_code}{why}), step {scene.training.step}"
        )

    def meanwhile(self, work: Callable[[], T]) -> T:
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
            self.show()
            thread.join(FRAME_S)
        if errors:
            raise errors[0]
        if not results:
            raise UnavailableError("the cluster's keeper gave an answer that cannot be read")
        return results[0]

    def pause(self, seconds: float, *, watch: bool = False) -> None:
        """Let people read; with `watch` the scene goes on."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if watch:
                self.show()
            time.sleep(min(FRAME_S, left_s))

    def show(self) -> Scene:
        """Look, and have it shown."""
        scene = self.look()
        self._stage.frame(scene)
        return scene

    def look(self) -> Scene:
        """Return what is to be seen now."""
        return self._observer.look(
            elapsed_s=self.elapsed_s(), now_s=time.time(), title=self._title, story=tuple(self._told)
        )

    def elapsed_s(self) -> float:
        """Return for how long the story has been going on."""
        return time.monotonic() - self._began_s

    def act(self, title: str) -> None:
        """Begin a new act."""
        self._title = title
        self.say("act", title)

    def say(self, kind: str, text: str) -> None:
        """Tell one line of the story."""
        moment = Moment(at_s=self.elapsed_s(), kind=kind, text=text)
        self._told.append(moment)
        self._stage.tell(moment)

    def job(self, scene: Scene) -> dict[str, Any]:
        """Return the training job. Raises UnavailableError if it is not there."""
        job = scene.job(self.job_id)
        if job is None:
            raise UnavailableError(f"job {self.job_id} is not in the queue any more")
        return dict(job)

    def is_running(self, scene: Scene) -> bool:
        """Say whether the training job runs."""
        return bool(self.job(scene)["state"] == "RUNNING")

    def has_run(self, scene: Scene) -> bool:
        """Say whether the training job runs, or has since one looked last."""
        return self.job(scene)["state"] in ("RUNNING", "COMPLETING", "COMPLETED")


# ----- the job scripts that the demo submits, as text: the training, and small jobs beside it so that the queue is alive
# Knows no cluster. The training's script is the shape of etc/examples/train_chargpt.sh.


TRAIN_NAME = "chargpt"
OUT_DIR = "chargpt-out"
TRAIN_LOG = "chargpt-%j.out"

_TRAIN = """\
#!/bin/bash
#HSUB --job-name={name}
#HSUB --nodes=2 --ntasks-per-node=1 --cpus-per-task=2
#HSUB --time=00:30:00
#HSUB --requeue --open-mode=append
#HSUB --output={log}

mpirun {python} -P -m hpctrain.examples.chargpt --out {out} \\
    {options}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideJob:
    """A small job beside the training: its file's name, its text, the options it is submitted with and what it shows."""

    file: str
    text: str
    options: tuple[str, ...] = ()
    what: str = ""


def training_script(python: str, options: Sequence[str]) -> str:
    """Return the training's script; `python` is the interpreter that has the training's packages."""
    return _TRAIN.format(
        name=TRAIN_NAME, log=TRAIN_LOG, python=shlex.quote(python), out=OUT_DIR, options=" ".join(options)
    )


def training_options(seconds: float, checkpoint_every: int) -> list[str]:
    """Return the options of a training that takes about so long, with a checkpoint every so many steps."""
    return [
        f"--target-seconds {seconds:g}",
        f"--checkpoint-every {checkpoint_every}",
        "--base-every 5",
        "--eval-every 25",
    ]


def side_jobs(train_id: int, *, tasks: int) -> list[SideJob]:
    """Return the small jobs: an array that has the third node, one that waits for all nodes, one for the training."""
    return [
        SideJob(
            file="sweep.sh",
            text=(
                "#!/bin/sh\n"
                f"#HSUB --job-name=sweep --array=1-{tasks}%2 --nodelist=n3 --time=1 --output=/dev/null\n"
                "sleep $((3 + HPCSCHED_ARRAY_TASK_ID % 4))\n"
            ),
            what=f"an array of {tasks} short tasks, two at a time, on n3",
        ),
        SideJob(
            file="census.sh",
            text=(
                "#!/bin/sh\n"
                "#HSUB --job-name=census --nodes=3 --time=1 --nice --output=census.out\n"
                "hrun --label hostname | sort\n"
            ),
            what="one that has to wait for all three nodes",
        ),
        SideJob(
            file="report.sh",
            text=(
                "#!/bin/sh\n"
                "#HSUB --job-name=report --time=1 --output=report.out\n"
                f"grep weights {TRAIN_NAME}-{train_id}.out\n"
            ),
            options=(f"--dependency=afterok:{train_id}",),
            what="one for when the training is done",
        ),
    ]


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
        for side_job in side_jobs(self.job_id, tasks=self._plan.side_tasks):
            self._submit_beside(side_job)
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
            lambda scene: scene.training.attempt >= 1 or self._watch.job(scene)["state"] == "COMPLETED",
            FIRST_STEP_S,
            "the new attempt's first step",
        )
        self._outcome.resume_s = time.monotonic() - self._on_s
        self._outcome.lost_at = max(point.step for point in scene.training.points if point.attempt == 0)
        if scene.training.attempt < 1:  # a slow machine: the lost node was the last to hear of the end
            self._outcome.resumed_from = self._outcome.lost_at
            self._watch.say("good", f"all {self._outcome.lost_at} steps were taken before the loss: none is left to do")
            return
        _, step, _ = scene.training.resumes[-1]
        self._outcome.resumed_from = step
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
    parts = [f"{plural(node['cpus'], 'cpu')} and {node['mem_mib'] / 1024:g} GiB given to jobs"]
    if facts.get("python"):
        parts.append(f"Python {facts['python']}")
    if facts.get("kernel"):
        parts.append(f"Linux {str(facts['kernel']).split('-')[0]}")
    if facts.get("hostname"):
        parts.append(f"calls itself {facts['hostname']}")
    return ", ".join(parts)
