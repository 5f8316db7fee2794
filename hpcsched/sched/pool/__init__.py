"""Backfill on one pool of equal processors.

Used for simulations of logs, and for the shadow schedule of the default policy.
"""
