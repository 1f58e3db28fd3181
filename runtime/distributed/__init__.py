"""Processes: launching, groups, agreement between ranks.

Begin at `launch` (processes), `meeting` (ranks before groups) and `opening` (groups). `agreement` turns an error of
one rank into an error of all; `faults/` names the rank that failed first.
"""
