"""The serial answer, the law, and which row is bad."""
