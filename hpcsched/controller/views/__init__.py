"""Build the controller's answers: the queue, history, accounts, events in words."""
