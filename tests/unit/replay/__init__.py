"""Tests of apex_jax/replay."""
