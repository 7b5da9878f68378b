"""Data: rows, what holds them, which of them a call takes, and how these reach the replicas."""
