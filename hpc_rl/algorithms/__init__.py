"""Policy-gradient algorithms, one page each; core/algorithms.py has the table of their names.

To add one, write a page with `Options`, `compute_credit`, `compute_loss` and an `Algorithm` of these, and add
a row to the table. Users name their own as `package.module:name`.
"""
