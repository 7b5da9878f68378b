"""Variables: values of which each replica keeps its own copy between calls."""
