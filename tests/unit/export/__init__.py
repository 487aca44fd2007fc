"""Tests of apex_jax/export."""
