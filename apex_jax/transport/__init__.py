"""The transport of experience and weights: bytes between processes.

messages      the records sent between processes
wire          messages <-> frames, every field checked
params_codec  parameters of a network <-> bytes
sockets       the three links and their options
addresses     parses addresses, resolves host names
security      authentication and encryption (CURVE), and which keys are accepted
keys          reads and writes keys; `python main.py keys`
monitor       logs and counts refused keys and failed handshakes
http_link     a small HTTP server
status_link   serves a process's status over HTTP, for Prometheus, too
"""
