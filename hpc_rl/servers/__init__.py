"""Generation servers: a new backend is a module with the protocol of base.py.

Its row is in allocation.SERVER_BACKENDS.
"""
