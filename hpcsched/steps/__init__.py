"""The steps of running jobs: what a step asks for, where its tasks run, how it ends."""
