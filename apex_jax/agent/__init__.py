"""The algorithms: arrays in, arrays out; the only modules that use jax.jit. No clock, socket, file or thread."""
