"""The algorithm: arrays in, arrays out, and the only place that says jax.jit. No clock, socket, file or thread."""
