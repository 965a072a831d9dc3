"""Simulates trials on a virtual clock, with the rules of this package itself.

The sequencer, the staleness bound, the supervisor's state machine, the failure policy, the deadline, the job
policy, the choice of a checkpoint and the timers are the modules that run in a trial; only work, machines and
the scheduler are models here. `simulate.run(setup, costs)` is the entry.
"""
