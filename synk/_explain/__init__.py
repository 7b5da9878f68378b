"""What a call compiles, sends and communicates."""
