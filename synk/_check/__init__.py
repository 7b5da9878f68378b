"""Check: the serial answer, whether calls equal it, and the row that makes a NaN."""
