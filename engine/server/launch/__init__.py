"""Launches a server's processes and supervises them."""
