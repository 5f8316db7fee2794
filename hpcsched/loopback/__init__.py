"""Machines that are not there: nodes on loopback, for the demo and for tests."""
