"""--clusters: there is one cluster, and what is asked of another is refused."""

from __future__ import annotations

from collections.abc import Iterable

from hpcsched import client
from hpcsched.errors import RequestError


def own_cluster() -> str:
    """Return the cluster's name."""
    return str(client.call("GET", "/v1/ping")["cluster"])


def refuse_others(names: Iterable[str]) -> None:
    """Raise RequestError if one of `names` is a cluster's that is not this one; "all" are this one."""
    asked = [name for name in names if name and name != "all"]
    other = next((name for name in asked if name != own_cluster()), None)
    if other is not None:
        raise RequestError(f"No cluster '{other[:60]}' known by database.")
