"""Stages on other machines: the messages between the supervisor and the stages' agents, and how they meet.

An agent starts one stage on its machine and watches it, whether a person or a cluster started the agent.
"""
