"""`synk.function` and its members."""
