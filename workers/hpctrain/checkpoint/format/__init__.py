"""The format of checkpoints: manifests, chunks, logs of gradients, nested state."""
