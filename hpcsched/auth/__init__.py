"""Decide what a user may do: identities, roles, `authorize`, and the chain of the audit log.

Pure: no clock, disk, network or log.
"""
