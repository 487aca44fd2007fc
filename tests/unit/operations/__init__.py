"""Tests of apex_jax/operations."""
