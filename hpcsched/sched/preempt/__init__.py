"""Preemption, and elastic jobs that give nodes back or get more."""
