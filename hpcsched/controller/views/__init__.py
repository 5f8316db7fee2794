"""What the controller answers: the queue, history, accounts, events in words."""
