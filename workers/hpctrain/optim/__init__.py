"""Optimizers, their state, schedules and precision."""

from hpctrain.optim.adamw import AdamW

__all__ = ["AdamW"]
