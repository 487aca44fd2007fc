"""Tests of apex_jax/transport."""
