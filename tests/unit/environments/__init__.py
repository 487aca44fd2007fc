"""Tests of apex_jax/environments."""
