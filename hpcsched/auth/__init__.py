"""Decide what a user may do: identities, roles, `authorize`, tokens, and the audit chain.

Pure: no clock, disk, network or log.
"""
