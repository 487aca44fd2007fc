"""The roles of a run: the loops, sockets, threads and signals around the modules that do the work."""
