"""How the story waits: it shows scenes until something has happened, and says in words when it does not.

Knows the clock, the stage and one training job; not what is played.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hpcsched.demo.scene import Moment, Observer, Scene
from hpcsched.demo.stage import Stage
from hpcsched.errors import UnavailableError

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
