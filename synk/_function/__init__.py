"""Function: `synk.function`, and the members of what it makes."""
