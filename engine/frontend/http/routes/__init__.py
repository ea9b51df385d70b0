"""The HTTP routes: each reads its body, calls the engine, and replies. They make no decision about requests."""
