"""The runtime runs: process groups, the schedule executor, ZeRO-1. It decides nothing."""
