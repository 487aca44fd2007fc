"""Tests of apex_jax/agent."""
