"""Both ends of each link: servers and clients. Clients, and the weights server, run on threads of their own.

experience_client  actor: sends segments, and keeps them until they are stored
experience_server  replay server: stores them; its actors, and means of their games
sampling_client    learner: receives segments and index batches, sends priorities
sampling_server    replay server: the other end
weights_client     actors and evaluator: fetch weights
weights_server     learner: serves them
server             parts common to the three servers
connection         a client's thread, its hellos and heartbeats, and whether its server is joined or lost
in_process         the calls of all links in one process, without sockets and threads
"""
