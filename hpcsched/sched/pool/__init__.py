"""Backfill on one pool of alike processors: for simulations of logs, and for the default policy's shadow schedule."""
