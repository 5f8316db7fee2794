"""Simulated machines: nodes on loopback, for the demo and for tests."""
