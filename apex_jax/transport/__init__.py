"""The transport of experience and weights: bytes between processes.

messages      the records sent between processes
wire          messages <-> frames, every field checked
params_codec  parameters of a network <-> bytes
sockets       the three links, their options and their monitors
addresses     parses addresses, resolves host names
security      authentication and encryption (CURVE), and which keys are accepted
keys          reads and writes keys; `python main.py keys`
http_link     a small HTTP server, and the report of a process on it, for Prometheus, too
"""
