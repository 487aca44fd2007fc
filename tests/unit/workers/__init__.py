"""Tests of apex_jax/workers."""
