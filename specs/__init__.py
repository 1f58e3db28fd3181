"""Example specs and cluster descriptions, shipped as package data."""
