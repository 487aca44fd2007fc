"""Tests of apex_jax/plotting."""
