"""Alerts: what is wrong with the cluster, told once, to whom it concerns.

`rules` finds conditions, `state` makes alerts of them and decides what is told, `jobmail` makes the
mail of jobs, `messages` writes it all as text and as JSON. These four are pure. `sending` talks to
mail servers and receivers. `__main__` is the child of the controller that does it, with its state in
`alerts.db`; `hpcsched.controller.views.alerts` feeds it.
"""
