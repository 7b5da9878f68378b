"""Read programs written with jax.pmap, and say how synk spells them."""
