"""Both ends of each link: servers and clients. Clients, and the weights server, run on threads of their own."""
