"""Example specs, shipped as package data."""
