"""Train engines: a new one is a module with the protocol of base.py.

Its row is in allocation.TRAIN_BACKENDS.
"""
