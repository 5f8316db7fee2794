"""The controller's HTTP API over its unix socket: callers, permissions and answers."""
