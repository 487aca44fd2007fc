"""The machine (disk, cores, device), standard output, how the program was started, and error texts."""
