"""Requests from arrival to their last token: a state machine without sockets or a clock."""
