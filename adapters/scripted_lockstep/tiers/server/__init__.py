"""The server tier: scripts on a real server, with real stage processes and real HTTP clients."""
