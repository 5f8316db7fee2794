"""Jobs that make room for others: by preemption, or by giving nodes back."""
