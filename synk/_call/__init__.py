"""Call: one call, from bound arguments to committed updates."""
