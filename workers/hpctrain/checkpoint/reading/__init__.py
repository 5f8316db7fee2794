"""Reading checkpoints: restore, replay, export."""
