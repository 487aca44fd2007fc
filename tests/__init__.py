"""Tests: each name is a specification; `reference` holds the slow twins that the fast code is compared with."""
