"""The free resources of each node from now on: a step function of time.

The steps follow from the time limits of running jobs. Running jobs give back their shares when they
reach their limit. Starts and slots take their shares over an interval ``[start, end)``. Without
slots, the free resources of a node never decrease with time. A slot makes a *dip*.

Knows nothing of the order of jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from hpcsched.model.node import Share
from hpcsched.model.reservation import NEVER_S
from hpcsched.sched.experience import Needed
from hpcsched.sched.place.gpus import FreeGpus, GpuSlot, Grant, Units
from hpcsched.sched.policy import Policy
from hpcsched.sched.snapshot import NodeView, RunningJob, Snapshot

NodeResources = tuple[int, int, Units]  # free (or taken) cpus, memory in MiB, units of the node's GPU slots


def whole(node: NodeView) -> NodeResources:
    """Return all resources of the node."""
    return node.cpus, node.mem_mib, node.units


def less(room: NodeResources, use: NodeResources) -> NodeResources:
    return room[0] - use[0], room[1] - use[1], tuple([a - b for a, b in zip(room[2], use[2], strict=True)])


def _more(room: NodeResources, use: NodeResources) -> NodeResources:
    return room[0] + use[0], room[1] + use[1], tuple([a + b for a, b in zip(room[2], use[2], strict=True)])


def _holds(room: NodeResources, use: NodeResources) -> bool:
    return room[0] >= use[0] and room[1] >= use[1] and all([a >= b for a, b in zip(room[2], use[2], strict=True)])


def least(rooms: Sequence[NodeResources]) -> NodeResources:
    if len(rooms) == 1:
        return rooms[0]
    return (
        min(room[0] for room in rooms),
        min(room[1] for room in rooms),
        tuple([min(counts) for counts in zip(*(room[2] for room in rooms), strict=True)]),
    )


def _scarcity(room: NodeResources, node: int) -> tuple[int, int, int, int]:
    cpus, mem_mib, gpus = room
    return sum(gpus), cpus, mem_mib, node


class NodeProfile:
    """One node's free resources: `rooms[i]` holds from `times_s[i]` until the next time."""

    __slots__ = ("dips", "rooms", "times_s")

    def __init__(self, now_s: float, room: NodeResources) -> None:
        self.times_s = [now_s]
        self.rooms = [room]
        self.dips = False

    def give_back(self, at_s: float, use: NodeResources) -> None:
        """Add `use` from `at_s` on. Calls must be in the order of time."""
        if at_s == self.times_s[-1]:
            self.rooms[-1] = _more(self.rooms[-1], use)
        else:
            self.times_s.append(at_s)
            self.rooms.append(_more(self.rooms[-1], use))

    def take(
        self, start_s: float, end_s: float, use: NodeResources, known: dict[NodeResources, NodeResources] | None = None
    ) -> None:
        """Take `use` over ``[start_s, end_s)``; `known` caches resources less `use`."""
        rooms = self.rooms
        first, last = self._cut(start_s), self._cut(end_s)
        known = known if known is not None else {}
        for at in range(first, last):
            room = rooms[at]
            left = known.get(room)
            if left is None:
                left = known[room] = less(room, use)
            rooms[at] = left

    def give(self, start_s: float, end_s: float, use: NodeResources) -> None:
        """Add `use` over ``[start_s, end_s)``."""
        for at in range(self._cut(start_s), self._cut(end_s)):
            self.rooms[at] = _more(self.rooms[at], use)

    def earliest(self, use: NodeResources, length_s: float, from_s: float) -> float:
        """Return the first time at or after `from_s` with `use` free for `length_s`.

        `NEVER_S`: never.
        """
        times_s, rooms = self.times_s, self.rooms
        start_s = from_s
        for at in range(max(0, bisect_right(times_s, from_s) - 1), len(rooms)):
            if times_s[at] >= start_s + length_s:
                break
            if not _holds(rooms[at], use):
                start_s = times_s[at + 1] if at + 1 < len(times_s) else NEVER_S
        return start_s

    def free_over(self, start_s: float, end_s: float) -> NodeResources:
        """Return the resources that are free during all of ``[start_s, end_s)``."""
        first = bisect_right(self.times_s, start_s) - 1
        if not self.dips:
            return self.rooms[first]
        return least(self.rooms[first : max(first + 1, bisect_left(self.times_s, end_s))])

    def _cut(self, at_s: float) -> int:
        """Return the index of the step that begins at `at_s`; make the step if it is missing."""
        at = bisect_left(self.times_s, at_s)
        if at == len(self.times_s) or self.times_s[at] != at_s:
            self.times_s.insert(at, at_s)
            self.rooms.insert(at, self.rooms[at - 1])
        return at


class Timeline:
    """The profiles of all nodes, by their index in the snapshot.

    `taken`, `changed` and `given` list, in order, the taken resources, the nodes with new starts, and the nodes of released
    slots, so that readers can catch up. `dips_s` has the starts of slots, ascending. While `reservations` (the number of
    changes of slots) is constant, two windows from now with equally many dips before their end have the same free resources.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy, needed: Needed | None = None) -> None:
        self.now_s = snapshot.now_s
        self._policy = policy
        self._needed = needed  # if requests are not trusted
        self.nodes = snapshot.nodes
        self.types = [node.slots for node in snapshot.nodes]
        kinds: dict[tuple[int, int, tuple[GpuSlot, ...]], int] = {}  # nodes of one kind are equal for every share
        self.kinds = [
            kinds.setdefault((node.cpus, node.mem_mib, types), len(kinds))
            for node, types in zip(self.nodes, self.types, strict=True)
        ]
        self.index = {node.name: at for at, node in enumerate(snapshot.nodes)}
        self.free_gpus = [FreeGpus(node.gpus, slots) for node, slots in zip(self.nodes, self.types, strict=True)]
        self.taken: list[tuple[int, float, float]] = []  # node, from, until
        self.changed: list[int] = []
        self.given: list[int] = []
        self.dips_s: list[float] = []
        self.reservations = 0
        self.sure_until_s = float("inf")  # later times depend on the end of a job without a limit
        self.profiles = self._profiles(snapshot.running)
        self.scarcity = [_scarcity(profile.rooms[0], node) for node, profile in enumerate(self.profiles)]
        self._left: dict[NodeResources, dict[NodeResources, NodeResources]] = {}  # by use and resources: the rest

    def start(self, node: int, end_s: float, use: NodeResources) -> Grant:
        """Take `use` of a node from now until `end_s`, and return the GPUs of it."""
        grant = self.free_gpus[node].grant(use[2])
        self._take(node, self.now_s, end_s, use)
        self.changed.append(node)
        self.scarcity[node] = _scarcity(self.profiles[node].rooms[0], node)
        return grant

    def reserve(self, node: int, start_s: float, end_s: float, use: NodeResources) -> None:
        """Take `use` of a node for a slot."""
        self._take(node, start_s, end_s, use)
        self.profiles[node].dips = True
        self.reservations += 1
        at = bisect_left(self.dips_s, start_s)
        if at == len(self.dips_s) or self.dips_s[at] != start_s:
            self.dips_s.insert(at, start_s)

    def take_back(self, node: int, start_s: float, end_s: float, use: NodeResources) -> None:
        """Give back the resources that `reserve` took."""
        self.profiles[node].give(start_s, end_s, use)
        self.given.append(node)
        self.reservations += 1

    def absorb(self, share: Share, end_s: float) -> None:
        """Take a share, from now until `end_s`, that another plan assigned.

        It may exceed the free resources here.
        """
        node = self.index[share.node]
        self._take(node, self.now_s, end_s, (share.cpus, share.mem_mib, self.free_gpus[node].hold(share)))
        self.changed.append(node)
        self.scarcity[node] = _scarcity(self.profiles[node].rooms[0], node)

    def least_free(self, nodes: list[int], count: int) -> list[int]:
        """Return the `count` of `nodes` with the least free resources now, in the order of nodes."""
        if len(nodes) > count:
            nodes = sorted(nodes, key=self.scarcity.__getitem__)[:count]
        return sorted(nodes)

    def _take(self, node: int, start_s: float, end_s: float, use: NodeResources) -> None:
        self.profiles[node].take(start_s, end_s, use, self._left.setdefault(use, {}))
        self.taken.append((node, start_s, end_s))

    def free_until(self, node: int, end_s: float) -> NodeResources:
        """Return the resources that are free on a node from now until `end_s`."""
        profile = self.profiles[node]
        return profile.free_over(self.now_s, end_s) if profile.dips else profile.rooms[0]

    def end_of(self, job: RunningJob) -> float:
        """Return the expected end of `job`, when its shares are free again."""
        overdue_s = self.now_s + self._policy.overdue_s
        if job.ends_at_s is None:
            end_s = max(job.began_at_s + self._policy.default_time_limit_s, overdue_s)
        else:
            end_s = job.ends_at_s if job.ends_at_s > self.now_s else overdue_s
        if self._needed is None or job.ending or end_s <= overdue_s:
            return end_s
        return self._needed.end_s(job.uid, job.began_at_s, end_s, self.now_s)

    def _profiles(self, running: Iterable[RunningJob]) -> list[NodeProfile]:
        rooms = [whole(node) for node in self.nodes]
        ends: list[tuple[float, int, NodeResources]] = []
        for job in running:
            end_s = self.end_of(job)
            if job.ends_at_s is None:
                self.sure_until_s = min(self.sure_until_s, end_s)
            for share in job.shares:
                node = self.index.get(share.node)
                if node is None:
                    continue
                use = share.cpus, share.mem_mib, self.free_gpus[node].hold(share)
                rooms[node] = less(rooms[node], use)
                ends.append((end_s, node, use))
        profiles = [NodeProfile(self.now_s, room) for room in rooms]
        ends.sort()
        for end_s, node, use in ends:
            profiles[node].give_back(end_s, use)
        return profiles
