"""The algorithm: pure functions of arrays, and the only place that says jax.jit. No clock, socket, file or thread."""
