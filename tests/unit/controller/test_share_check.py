"""Who may have nodes compare the share, and what they can name."""

from __future__ import annotations

import asyncio

import pytest
from cluster import ANN, ROOT, Cluster

from hpcnode.wire.protocol import PROBE_PREFIX
from hpcsched.config.load import build_config
from hpcsched.errors import PermissionDeniedError, RequestError

PROBE = {"file": PROBE_PREFIX + "b" * 16, "sha256": "a" * 64, "uid": "0"}


def ask(who: object, share: dict[str, str]) -> None:
    cluster = Cluster("n1")
    tables = {"cluster": {"share": "/srv/share"}}
    cluster.state.config = build_config(tables, [], config_dir=cluster.state.config.config_dir, environ={})
    query = {f"share_{name}": value for name, value in share.items()}
    asyncio.run(cluster.backend().nodes(who, query))  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [PROBE, {"file": PROBE["file"]}, {"file": "/etc/shadow"}])
def test_only_admins_may_have_nodes_compare_the_share(share: dict[str, str]) -> None:
    with pytest.raises(PermissionDeniedError, match="this needs the role admin"):
        ask(ANN, share)


@pytest.mark.parametrize(
    "change", [{"file": "../etc/shadow"}, {"file": PROBE["file"] + "/x"}, {"sha256": ""}, {"sha256": "A" * 64}]
)
def test_only_a_share_probe_is_compared(change: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="does not name a share probe"):
        ask(ROOT, PROBE | change)
