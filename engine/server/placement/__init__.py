"""Stages on other machines: what the supervisor and the agents there say to each other, and how they meet.

An agent starts one stage on its machine and watches it. It is the same whether a person or a cluster started it.
"""
