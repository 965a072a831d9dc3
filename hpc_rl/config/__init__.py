"""The configuration: dataclasses (one file per section), loading, cross-section checks. No torch here.

Options have AReaL's names; options that AReaL lacks are marked "hpc-rl extension".
"""
