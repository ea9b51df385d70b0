"""A stage computed by OpenVINO on a CPU: converted from transformers, with paged attention over our page tables.

Imported only when it is chosen.
"""
