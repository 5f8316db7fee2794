"""The controller's HTTP API over its unix socket: who asks, what they may do, and how answers look."""
