"""Helpers of tests: processes, links, a proxy, fleets."""
