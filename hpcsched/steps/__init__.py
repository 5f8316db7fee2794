"""Steps of running jobs: what a step requests, where its tasks run, and how it ends."""
