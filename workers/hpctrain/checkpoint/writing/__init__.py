"""Writing checkpoints: snapshots, the writer process, publication, local fallback."""
