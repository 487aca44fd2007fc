"""The machine and this program's place on it: disk, cores, device, output, error texts."""
