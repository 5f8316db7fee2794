"""How a checkpoint is written: snapshots, buffers, the writer process, publication, local fallback."""
