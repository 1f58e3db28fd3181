"""Predicts bytes and seconds."""
