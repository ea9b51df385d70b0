"""Stages on other machines: the messages between the supervisor and the stages' agents, and their rendezvous.

An agent, started by a person or a cluster, starts one stage on its machine and watches it.
"""
