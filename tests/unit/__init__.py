"""Tests of one module each, under its name."""
