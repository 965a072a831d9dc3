"""The configuration: dataclasses (one file per section), loading, cross-section checks. No torch here.

The names are those of the AReaL tables; what is ours alone says so.
"""
