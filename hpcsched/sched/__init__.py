"""The scheduler: snapshot in, plan out. Pure; `plan` is its heart.

The controller takes a `snapshot.snapshot_of` its cluster state each tick and follows its `plan.plan`. At submission it asks
`place.request.request_of` and `place.feasible.impossible`. The simulator does the same with a virtual clock.
"""
