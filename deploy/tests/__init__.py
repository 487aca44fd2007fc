"""Tests of deploy/: make test-deploy."""
