"""How a checkpoint is read: restored, replayed, exported."""
