"""Writing checkpoints: snapshots, buffers, the writer process, publication, local fallback."""
