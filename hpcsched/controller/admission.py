"""May this job be submitted by this user? Account, QOS and licences are settled here, before anything is recorded.

What passes has the account and the QOS that it will be charged to in its specification.
"""

from __future__ import annotations

from dataclasses import replace

from hpcsched.errors import RequestError
from hpcsched.model.accounting import Accounting, resolve
from hpcsched.model.nearest import nearest
from hpcsched.model.spec import JobSpec
from hpcsched.store.world import World


def settle(world: World, user: str, spec: JobSpec) -> JobSpec:
    """Return `spec` with the account and QOS that a job of `user` gets. Raises RequestError if it may not have them."""
    accounting = world.config.accounting
    account, qos = resolve(accounting, user, spec.account, spec.qos)
    _check_licenses(accounting, spec)
    if (account, qos) == (spec.account, spec.qos):
        return spec
    return replace(spec, account=account, qos=qos)


def _check_licenses(accounting: Accounting, spec: JobSpec) -> None:
    there = dict(accounting.licenses)
    for name, count in spec.licenses:
        if name not in there:
            known = ", ".join(there) or "none"
            raise RequestError(
                f"cannot give job licence {name!r}: Invalid license specification{nearest(name, there)}; there are: {known}"
            )
        if count > there[name]:
            raise RequestError(
                f"cannot give job {count} licences {name!r}: Invalid license specification; the cluster has {there[name]}"
            )
