"""Optimizers, their state, schedules and precision."""
