"""Why a job waits, and what would start if things were different."""
