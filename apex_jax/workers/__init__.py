"""The roles of a run: loops, sockets, threads and signals around the modules that do the work."""
