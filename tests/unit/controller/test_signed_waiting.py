"""Jobs whose signature expires, or is used up, while they wait: held with a reason, until their user has signed them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import ANN, Cluster, config
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jobs import spec

from hpcnode.wire import protocol
from hpcsched.controller.planning import SIGNATURE_LEFT_S
from hpcsched.controller.requests.jobs import requeue
from hpcsched.controller.requests.submission import submit
from hpcsched.controller.requests.update import update
from hpcsched.errors import ConfigError, RequestError
from hpcsched.jobscript import signing
from hpcsched.model.frozen import replace
from hpcsched.model.ids import JobId
from hpcsched.model.job import JobState, Reason
from hpcsched.model.spec import SIGNED_REQUEST, ArraySpec, Dependency, DependencyKind, JobSpec

KEY = Ed25519PrivateKey.generate()


class Signed(Cluster):
    """A cluster of one node whose users sign their jobs."""

    def __init__(self, *names: str) -> None:
        super().__init__(*(names or ("n1",)))
        self.state.config = config(sign_jobs=True, requeue_delay_s=0)

    def signer(self, valid_s: int = 100) -> signing.Signer:
        cluster = self.state.config.name
        return signing.Signer(key=KEY, user=ANN.user, uid=ANN.uid, cluster=cluster, now_s=self.now_s, valid_s=valid_s)

    def send(self, one: JobSpec) -> JobId:
        answer = self.ask(lambda tx: submit(tx, ANN, "", [one], self.store.request_jobs))
        return JobId(answer[0]["job_id"])

    def sign(self, **fields: Any) -> JobId:
        return self.send(signing.signed_job(spec(**fields), self.signer()))

    def sign_again(self, job_id: JobId) -> list[str]:
        job = self.job(job_id)
        text, _ = signing.renewed(job.spec.signed, job.attempt, self.signer())
        outcome = self.ask(lambda tx: update(tx, ANN, [str(job_id)], {"signed": text}))
        return [error["error"] for error in outcome.errors]

    def why(self, job_id: JobId) -> tuple[Reason, str]:
        wait = self.state.waits[job_id]
        return wait.reason, wait.detail


def test_a_job_with_an_expired_signature_is_held_and_runs_after_it_is_signed_again() -> None:
    cluster = Signed()
    first = cluster.submit()
    second = cluster.sign(cpus_per_task=2)
    cluster.tick(100 - SIGNATURE_LEFT_S)
    assert cluster.job(second).state is JobState.PENDING
    cluster.end(first)
    cluster.gone(first, "n1")
    cluster.tick()
    assert cluster.job(second).state is JobState.PENDING
    reason, detail = cluster.why(second)
    assert reason is Reason.HELD_USER
    assert f"sign it again on the head: hctl sign {second}" in detail
    assert cluster.sign_again(second) == []
    cluster.tick()
    assert cluster.job(second).state is JobState.CONFIGURING
    assert cluster.replayed(second).spec.signed == cluster.job(second).spec.signed
    launch = cluster.sent(protocol.Launch)[-1][1]
    assert launch.env[SIGNED_REQUEST] == cluster.job(second).spec.signed


def test_what_depends_on_a_job_that_must_be_signed_again_waits_for_it() -> None:
    cluster = Signed("n1", "n2")
    first = cluster.sign(begin_at_s=cluster.now_s + 200)
    after = (Dependency(kind=DependencyKind.AFTER_ANY, job_ids=(first,)),)
    second = cluster.send(signing.signed_job(spec(dependency=after), cluster.signer(valid_s=1000)))
    cluster.tick(100)
    assert cluster.why(first)[0] is Reason.HELD_USER
    assert cluster.job(second).state is JobState.PENDING
    assert cluster.why(second)[0] is Reason.DEPENDENCY


def test_the_end_of_a_signature_makes_a_plan() -> None:
    cluster = Signed()
    cluster.submit(cpus_per_task=2)
    cluster.sign(cpus_per_task=2)
    cluster.tick()
    assert min(after_s for after_s in cluster.ports.wakes if after_s > 1) == 100 - SIGNATURE_LEFT_S


def test_a_job_whose_attempts_are_used_up_is_held() -> None:
    cluster = Signed()
    job_id = cluster.sign(requeue=True)
    signed = replace(cluster.job(job_id), attempt=signing.MORE_ATTEMPTS - 1)
    cluster.state.jobs[job_id] = signed
    cluster.run(job_id)
    cluster.ask(lambda tx: requeue(tx, ANN, [str(job_id)]))
    cluster.end(job_id)
    cluster.gone(job_id, "n1")
    cluster.tick(1)
    assert cluster.job(job_id).attempt == signing.MORE_ATTEMPTS
    assert "allows no further attempt" in cluster.why(job_id)[1]
    cluster.sign_again(job_id)
    cluster.tick()
    assert cluster.job(job_id).state is JobState.CONFIGURING


def test_tasks_of_an_array_are_signed_again_together() -> None:
    cluster = Signed()
    job_id = cluster.sign(array=ArraySpec(indices=(1, 2, 4)), cpus_per_task=2)
    cluster.tick(100)
    last = max(cluster.state.pending)
    assert f"hctl sign {job_id}" in cluster.why(last)[1]
    assert cluster.sign_again(job_id) == []
    assert cluster.job(last).spec.signed_until_s > cluster.now_s


@pytest.mark.parametrize(
    ("field", "value"),
    [("script", "#!/bin/sh\nevil\n"), ("script_args", ("y",)), ("work_dir", "/"), ("stdout", "/root/x"),
     ("env", (("PATH", "/evil"),)), ("nodes_max", 2), ("signed_until_s", 1), ("signed", "{}"), ("signed", "[" * 9999)],
)  # fmt: skip
def test_a_job_that_differs_from_its_signature_is_refused_at_submission(field: str, value: Any) -> None:
    cluster = Signed("n1", "n2")
    signed = signing.signed_job(spec(), cluster.signer())
    changes = {field: value} | ({"nodes_min": 1} if field == "nodes_max" else {})
    with pytest.raises(RequestError, match="signed|signature"):
        cluster.send(replace(signed, **changes))


def test_another_user_cannot_submit_what_somebody_has_signed() -> None:
    cluster = Signed()
    signed = signing.signed_job(spec(), replace_user(cluster.signer(), "bob", 1002))
    with pytest.raises(RequestError, match="differs from what its user has signed in its uid, user"):
        cluster.send(signed)


def test_no_key_is_made_where_nodes_would_not_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="Submit on the head, or copy your key from the head: scp HEAD"):
        signing.own_key("ann", may_make=False)
    assert list(tmp_path.iterdir()) == []
    made = signing.own_key("ann")
    assert signing.own_key("ann", may_make=False).private_bytes_raw() == made.private_bytes_raw()


def test_what_differs_is_named_by_its_option() -> None:
    cluster = Signed("n1", "n2")
    signed = signing.signed_job(spec(nodes_min=2, nodes_max=2, time_limit_s=600), cluster.signer())
    with pytest.raises(RequestError, match="requeueing .--requeue, --no-requeue., time limit .*--time"):
        cluster.send(replace(signed, time_limit_s=1200, requeue=False))


def replace_user(by: signing.Signer, user: str, uid: int) -> signing.Signer:
    return signing.Signer(key=by.key, user=user, uid=uid, cluster=by.cluster, now_s=by.now_s, valid_s=by.valid_s)


def test_only_what_the_key_has_signed_is_signed_again() -> None:
    cluster = Signed()
    job_id = cluster.sign(hold=True)
    text = cluster.job(job_id).spec.signed
    other = Ed25519PrivateKey.generate()
    by = cluster.signer()
    thief = signing.Signer(key=other, user=by.user, uid=by.uid, cluster=by.cluster, now_s=by.now_s)
    with pytest.raises(RequestError, match="your key did not sign what the controller sent"):
        signing.renewed(text, 0, thief)
    for forged in (text.replace("attempts", "attempt_"), "", "[]", "{}", text[:-1]):
        with pytest.raises(RequestError, match="cannot sign the job again"):
            signing.renewed(forged, 0, by)


@pytest.mark.parametrize(("text", "seconds"), [("", 7 * 86400), ("1-0", 86400), ("0:02:00", 120)])
def test_users_choose_how_long_their_signatures_are_valid(text: str, seconds: int) -> None:
    assert signing.valid_s({signing.VALID_FOR: text}) == seconds


@pytest.mark.parametrize("text", ["0", "91-0", "UNLIMITED"])
def test_a_signature_that_is_valid_too_shortly_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="between a minute and 90 days"):
        signing.valid_s({signing.VALID_FOR: text})
