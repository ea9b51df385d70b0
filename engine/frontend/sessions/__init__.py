"""Requests from admission to their last token: a state machine without sockets or a clock."""
