"""The HTTP routes: each reads its body, asks the engine, and answers. They decide nothing about requests."""
