"""Tests of apex_jax/run."""
