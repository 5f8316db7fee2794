"""Recurring jobs whose next submission cannot be, or that somebody else wants for an account."""

from __future__ import annotations

from datetime import datetime

import pytest
from cluster import ANN, ROOT, Cluster
from jobs import spec

from hpcsched.auth.authorize import Identity, Role
from hpcsched.controller.requests import crontabs
from hpcsched.errors import PermissionDeniedError
from hpcsched.model.codec import spec_to_json
from hpcsched.model.job import JobState

# A 29th of February that is a Sunday: after 2088 not before 2128, as 2100 is not a leap year.
RARE = "0 4 29 2 */7"
DAY_S = 86_400.0
AFTER_2088_S = datetime(2090, 1, 1).timestamp()


def test_a_schedule_that_is_never_due_is_told_and_keeps_no_other_entry_from_its_job() -> None:
    cluster = Cluster("n1")
    cluster.tick(AFTER_2088_S - cluster.now_s)
    text = f"{RARE} true\n@daily true\n"
    job = spec_to_json(spec())
    cluster.ask(lambda tx: crontabs.install(tx, ANN, text, [job, job]))
    cluster.tick()
    never, daily = crontabs.view(cluster.state.crontabs[ANN.uid])["entries"]
    assert never["job_id"] is None
    assert never["problem"] == f"its schedule {RARE!r} is not due in the next 30 years"
    assert cluster.job(daily["job_id"]).state is JobState.PENDING
    asked_again_s = crontabs.next_retry_s(cluster.state, cluster.now_s)
    assert asked_again_s is not None
    assert asked_again_s > cluster.now_s + DAY_S
    cluster.tick(datetime(2100, 1, 1).timestamp() - cluster.now_s)
    never, _ = crontabs.view(cluster.state.crontabs[ANN.uid])["entries"]
    assert cluster.job(never["job_id"]).not_before_s == datetime(2128, 2, 29, 4).timestamp()
    assert never["problem"] == ""


def test_a9_an_admin_who_is_not_root_installs_no_crontab_of_root() -> None:
    """Where jobs of root are allowed, it would make an admin root on all nodes."""
    backend = Cluster("n1").backend()
    admin = Identity(uid=4001, user="adm", role=Role.ADMIN)
    with pytest.raises(PermissionDeniedError, match="only root and the controller's account can"):
        backend._owner(admin, "root", changes=True)
    assert backend._owner(admin, "root").uid == 0
    assert backend._owner(ROOT, "root", changes=True).uid == 0
