"""Both ends of each link: services, which a server serves in turn, and streams, on a thread of their own."""
