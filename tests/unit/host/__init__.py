"""Tests of apex_jax/host."""
