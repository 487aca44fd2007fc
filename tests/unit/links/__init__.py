"""Tests of apex_jax/links."""
