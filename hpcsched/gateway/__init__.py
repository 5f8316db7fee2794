"""The gateway: HTTPS for the controller's API, in a process and account of its own.

It holds no key of the cluster and decides nothing: it forwards what clients send as credentials, and the controller checks
them. See docs/rest.md.
"""
