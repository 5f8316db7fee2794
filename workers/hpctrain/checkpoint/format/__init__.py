"""What a checkpoint is: manifests, chunks, packed data, logs of gradients."""
