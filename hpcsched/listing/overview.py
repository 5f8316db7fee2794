"""What a cluster has and what is wrong with it, for the web pages and hmon.

It takes answers of the API. Knows neither pages nor terminals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcsched.model.node import Power

Json = Mapping[str, Any]


def totals(nodes: Sequence[Json]) -> dict[str, int]:
    """Return how much of each resource the nodes have, and how much jobs hold."""
    return {
        "nodes": len(nodes),
        "up": sum(takes_jobs(node) for node in nodes),
        "cpus": sum(node["cpus"] for node in nodes),
        "cpus_alloc": sum(node["cpus_alloc"] for node in nodes),
        "mem_mib": sum(node["mem_mib"] for node in nodes),
        "mem_alloc_mib": sum(node["mem_alloc_mib"] for node in nodes),
        "gpus": sum(len(node["gpus"]) for node in nodes),
        "gpus_alloc": sum(node["gpus_alloc"] for node in nodes),
    }


def takes_jobs(node: Json) -> bool:
    """Return whether jobs may start on the node, if need be after it was switched on."""
    return not node["drained"] and (node["link"] == "up" or node["power"] != Power.ON)


def troubles(ping: Json, nodes: Sequence[Json]) -> list[dict[str, str]]:
    """Return what is wrong: a sentence, and the command that helps."""
    found = []
    for node in nodes:
        name = node["name"]
        if node["power"] != Power.ON:
            continue  # it is off to save power, and is switched on for a job
        if node["link"] != "up":
            found.append(
                {"text": f"node {name} does not answer: {node['link_why']}", "command": f"hpcsched doctor {name}"}
            )
        elif node["drained"]:
            found.append({"text": f"node {name} is drained: {node['drained_why']}", "command": f"hctl resume {name}"})
        elif node["launch_failures"]:
            found.append(
                {
                    "text": f"node {name} cannot start jobs: {node['launch_failure']}",
                    "command": f"hpcsched doctor {name}",
                }
            )
    found += [{"text": text, "command": "hctl reconfigure"} for text in ping["not_taken"]]
    if ping["undecided"]:
        text = f"{ping['undecided']} launches from before a restore wait for a decision"
        found.append({"text": text, "command": "hctl strays"})
    return found


PHASES, SEVERITIES = ("firing", "pending", "resolved"), ("critical", "warning", "info")  # the worst first


def worst_first(alerts: Sequence[Json]) -> list[Json]:
    """Return alerts as the API has them in the order in which people look at them."""
    return sorted(
        alerts, key=lambda one: (_place(PHASES, one["phase"]), _place(SEVERITIES, one["severity"]), _at_s(one))
    )


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _at_s(alert: Json) -> float:
    """Return since when the alert is in its phase."""
    at_s = alert["ended_at_s"] if alert["phase"] == "resolved" else alert["since_s"]
    return float(at_s or 0.0)
