"""Train engines: to add one, add a module with the protocol of base.py and a row of TRAIN_BACKENDS."""
