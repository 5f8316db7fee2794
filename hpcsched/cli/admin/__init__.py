"""The commands that set up and run a cluster: hpcsched init, up, down, status, backup, restore, demo."""
