"""The HTTP server: routes, connections, authentication, metrics, and the sockets to the scheduler."""
