"""Commands: what `python -m synk` does beside `info`. No other room imports them."""
