"""Gradient buffers, ZeRO-1, norm, learning rate, loss scale."""
