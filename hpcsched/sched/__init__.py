"""Snapshot in, plan out: which waiting jobs start now, on what, and why the others wait. Pure; `plan` is the heart.

The controller takes a `snapshot.snapshot_of` its world each tick and follows its `plan.plan`; at submission it asks
`request.request_of` and `feasible.impossible`. The simulator does the same with a virtual clock.
"""
