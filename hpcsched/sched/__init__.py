"""The scheduler: snapshot in, plan out. Pure; the main function is `plan`.

At each tick, the controller makes a snapshot of its cluster state (`snapshot.snapshot_of`) and applies the
plan (`plan.plan`). At submission it calls `place.request.request_of` and `place.feasible.impossible_shape`. The
simulator does the same with a virtual clock.
"""
